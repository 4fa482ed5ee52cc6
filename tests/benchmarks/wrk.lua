-- wrk's figures as one line of JSON on standard error.
function done(summary, latency, requests)
   local errors = summary.errors
   io.stderr:write(string.format(
      '{"requests": %d, "received_bytes": %.0f, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "errors": %d}\n',
      summary.requests, summary.bytes, summary.duration / 1e6,
      latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
      errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
