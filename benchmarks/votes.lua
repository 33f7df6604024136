-- What wrk sends to the feedback service: votes nobody sent before, ROWS of them to a body.
-- wrk -t1 -c16 -d60 -s benchmarks/votes.lua http://127.0.0.1:8080/v1/feedback

local rows = tonumber(os.getenv("ROWS") or "1")
local run = os.getenv("RUN") or "one"
local n = 0

wrk.method = "POST"
wrk.headers["content-type"] = "application/json"

local function vote()
  n = n + 1
  return string.format(
    '{"agent_id": "tea", "kind": "thumbs", "value": "up", "prompt": "Why is the sky blue?", '
      .. '"completion": "Because of how air scatters light, number %d.", '
      .. '"idempotency_key": "%s %d"}', n, run, n)
end

function request()
  if rows == 1 then
    return wrk.format(nil, nil, nil, vote())
  end
  local votes = {}
  for i = 1, rows do
    votes[i] = vote()
  end
  return wrk.format(nil, nil, nil, '{"events": [' .. table.concat(votes, ", ") .. "]}")
end

function done(summary, latency)
  local e = summary.errors
  local errors = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format('{"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, errors))
end
