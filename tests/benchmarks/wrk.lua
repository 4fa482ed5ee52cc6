-- Request the paths in the file $PATHS in turn, and print wrk's figures as one line of JSON to
-- standard error. `%d` in a header becomes another number in each request.
local paths, turn, number = {}, 0, 0

function init()
   for path in io.lines(os.getenv("PATHS")) do paths[#paths + 1] = wrk.format("GET", path) end
end

function request()
   turn = turn % #paths + 1
   if not paths[turn]:find("%d", 1, true) then return paths[turn] end
   number = number + 1
   return (paths[turn]:gsub("%%d", number, 1))
end

function done(summary, latency, requests)
   local errors = summary.errors
   io.stderr:write(string.format(
      '{"requests": %d, "received_bytes": %.0f, "seconds": %.6f, "refused": %d, "errors": %d}\n',
      summary.requests, summary.bytes, summary.duration / 1e6,
      errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
