# Stages of a run, one after the other, and the table at its end. Sourced by .ci/run, .ci/nightly and .ci/bench-check.
#
# A stage is a line "name | command | kind". Each ends: what hangs is killed after STAGE_S seconds. A stage of "tests"
# prints pytest's closing line last; without such a line, or with one that counts no passed test (pytest's exit status 5
# included), it has failed. "Optional" tests may all be skipped, where the machine lacks what they need. A "check" goes by
# its exit status.

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

table=() reasons=()
failed=0

now() { date -u +%Y-%m-%dT%H:%M:%SZ; }

# One stage; returns 1 when it has failed.
stage() {
  local name command kind log started status result=passed closing=
  IFS='|' read -r name command kind <<<"$1"
  name=${name// /} kind=${kind// /}
  log=$scratch/$name.log
  echo "=== $(now) $name starts:$command"
  started=$SECONDS
  timeout --kill-after=60 "$STAGE_S" bash -c "$command" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  [[ $status -eq 0 ]] || result="FAILED (status $status)"
  if [[ $kind != check ]]; then
    closing=$(grep -aE '^(=+ )?.*[0-9]+ (passed|failed|errors?|skipped|deselected|late).* in [0-9.]+s|^=+ no tests ran' "$log" |
      tail -n 1)
    if [[ $status -eq 0 && ! $closing =~ [0-9]+\ passed ]]; then
      [[ $kind == optional && $closing =~ [0-9]+\ skipped ]] && result=skipped || result="FAILED (no test passed)"
    fi
  fi
  echo "=== $(now) $name $result after $((SECONDS - started)) s"
  [[ -z $closing ]] || echo "$closing"
  table+=("$(printf '%-16s %6d s  %s' "$name" "$((SECONDS - started))" "$result${closing:+  $closing}")")
  [[ $result == FAILED* ]] || return 0
  failed=1
  # Who reads only the end of a log has the reason there.
  reasons+=("--- the end of $name" "$(tail -n 40 "$log" | cut -c -400)")
  return 1
}

report() {
  [[ $failed -eq 0 ]] || printf '%s\n' "${reasons[@]}"
  echo "=== $(now) all stages, $SECONDS s"
  printf '%s\n' "${table[@]}"
}
