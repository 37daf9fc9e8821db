#!/usr/bin/env bash
# What the action runs: andon falsify with all its reports, a summary for the job, and the verdict as exit code.
set -uo pipefail
mkdir -p "$REPORTS"
mapfile -t more < <(xargs -n 1 printf '%s\n' <<<"${ARGUMENTS:-}")  # words in quotes stay together
[ -n "${ARGUMENTS:-}" ] || more=()
if [ -n "${SCRIPT:-}" ]; then
    what=(--script "$SCRIPT")
elif [ -n "${FILE:-}" ]; then
    what=("$FILE")
else
    what=(--subject "${SUBJECT:?give script, file or subject}")
fi

andon falsify "${what[@]}" "${more[@]}" --json "$REPORTS/falsify.json" --junit "$REPORTS/falsify.xml" \
    --markdown "$REPORTS/falsify.md" --html "$REPORTS/falsify.html" 2>&1 | tee "$REPORTS/falsify.txt"
code=${PIPESTATUS[0]}

{
    case $code in
        0) echo "### Andon: all claims that apply hold, or are excused" ;;
        1) echo "### Andon: a claim is falsified" ;;
        2) echo "### Andon: a claim could not be decided, or none applies" ;;
        3) echo "### Andon: an excused claim holds; remove its --expected-failed" ;;
        64) echo "### Andon: wrong arguments; nothing was run" ;;
        *) echo "### Andon: the campaign was ended ($code)" ;;
    esac
    if [ -f "$REPORTS/falsify.md" ]; then cat "$REPORTS/falsify.md"; fi
    echo '```text'
    sed 's/```/` ` `/g' "$REPORTS/falsify.txt"
    echo '```'
} >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$code"
