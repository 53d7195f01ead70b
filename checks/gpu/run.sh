#!/bin/sh
# Builds, checks and times fusedops on a GPU machine: `make gpu PYTHON=python3 RESULTS=build/gpu`.
#
# Each step runs whatever became of the others, and ends at its limit, in seconds; BUILD_S and the
# like change it. RESULTS gets each step's log and results, and RESULTS.tar.gz all of them.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3} results=${RESULTS:-build/gpu}
mkdir -p "$results" || exit 1
failed=

archive() {
  tar -czf "$results.tar.gz" -C "$(dirname "$results")" "$(basename "$results")" || failed="$failed archive"
  [ -z "$failed" ] || { echo "failed:$failed; see $results.tar.gz" >&2; exit 1; }
  echo "passed; see $results.tar.gz"
}
trap archive EXIT
trap 'failed="$failed interrupted"; exit 1' INT TERM HUP

step() {  # its name, its limit, its command
  name=$1 limit=$2
  shift 2
  echo "$name, at most $limit s"
  # After SIGINT, pytest still writes its report. A hung kernel needs SIGKILL.
  timeout --signal=INT --kill-after=30 "$limit" "$@" > "$results/$name.log" 2>&1
  status=$?
  tail -n 3 "$results/$name.log"
  [ $status = 0 ] || failed="$failed $name ($status)"
}

step build "${BUILD_S:-900}" "$python" -m checks.gpu.build
step smoke "${SMOKE_S:-600}" "$python" -m checks.gpu.smoke
step tests "${TESTS_S:-3600}" "$python" -m pytest -v -p no:cacheprovider -k "cuda or triton" \
  --junitxml="$results/tests.xml"
step benchmarks "${BENCHMARKS_S:-3600}" "$python" -m benchmarks gpu --no-compile \
  --out "$results"
