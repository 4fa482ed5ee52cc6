-- Send the requests in the file $REQUESTS in turn, and print wrk's figures as one line of JSON to
-- standard error. A line is a path to GET. Or it is a path to PUT, the SHA-256 of the body in
-- base64, and the end of the body, which begins with $PUT_BYTES bytes "x". `%d` in a header becomes
-- another number in each request. With $PAUSE_MS, each connection pauses before each request for a
-- random time with this mean, so that requests arrive whether or not earlier ones are answered.
local requests, turn, number = {}, 0, 0
local pause = tonumber(os.getenv("PAUSE_MS"))

local function put(path, digest, rest, body)
   local headers = {["Repr-Digest"] = "sha-256=:" .. digest .. ":"}
   return function() return wrk.format("PUT", path, headers, body .. rest) end
end

function init()
   local body = string.rep("x", tonumber(os.getenv("PUT_BYTES") or 0))
   for line in io.lines(os.getenv("REQUESTS")) do
      local path, digest, rest = line:match("^(%S+) (%S+) (%S+)$")
      requests[#requests + 1] = path and put(path, digest, rest, body) or wrk.format("GET", line)
   end
end

function request()
   turn = turn % #requests + 1
   local chosen = requests[turn]
   if type(chosen) == "function" then return chosen() end
   if not chosen:find("%d", 1, true) then return chosen end
   number = number + 1
   return (chosen:gsub("%%d", number, 1))
end

if pause then
   function delay() return math.floor(0.5 - pause * math.log(1 - math.random())) end
end

function done(summary, latency, _)
   local errors = summary.errors
   io.stderr:write(string.format(
      '{"requests": %d, "received_bytes": %.0f, "seconds": %.6f, "refused": %d, "errors": %d,'
         .. ' "latency_us": [%d, %d, %d, %d]}\n',
      summary.requests, summary.bytes, summary.duration / 1e6,
      errors.status, errors.connect + errors.read + errors.write + errors.timeout,
      latency:percentile(50), latency:percentile(99), latency:percentile(99.9), latency.max))
end
