"use strict";
{
  const zone = new Intl.DateTimeFormat().resolvedOptions().timeZone;
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
  const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
  const today = day.format(new Date());
  for (const time of document.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    const date = day.format(at);
    const local = date === today ? clock.format(at) : `${date}, ${clock.format(at)}`;
    time.textContent = `${local} (${time.textContent})`;
  }
  for (const note of document.querySelectorAll(".zone")) {
    note.textContent = `times are those of ${zone}, with UTC on hover; days and charts are UTC`;
  }
}
