#!/usr/bin/env bash
# cppcheck, clang-tidy 14 and gcc's -fanalyzer over base/ and formats/, which read what strangers
# wrote. Prints what they find, exit 1 if anything: tests/static_analysis.sh BUILD, where BUILD has
# a compile_commands.json. About a minute on two processors.
set -euo pipefail
build=$(cd "${1:?usage: static_analysis.sh BUILD}" && pwd)
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export scratch build
sources=(base/*.c formats/*.c)

# Left out, because they ask for another style rather than find a fault: neighbouring parameters of
# one type, results of printf (which cannot fail on buffers), unions and __ names (of the compiler),
# narrowing (-Wconversion finds it); va_list is a fault of clang-tidy 14 itself.
checks='-*,clang-analyzer-*,bugprone-*,cert-*,misc-redundant-expression,performance-*,portability-*'
checks+=',-bugprone-easily-swappable-parameters,-cert-err33-c,-cert-dcl37-c,-cert-dcl51-cpp'
checks+=',-bugprone-reserved-identifier,-bugprone-assignment-in-if-condition'
checks+=',-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling'
checks+=',-bugprone-not-null-terminated-result' # the pieces of a path, the last with its NUL
checks+=',-bugprone-narrowing-conversions,-clang-analyzer-valist.Uninitialized'
export checks

tidy() {
    clang-tidy-14 -p "$build" --quiet "--checks=$checks" "$1" 2>/dev/null |
        grep -E "warning:|error:" || true
}
analyze() {
    local isa=()
    case $1 in
    *_avx2.c) isa=(-mavx2) ;;
    *_avx512.c) isa=(-mavx2 -mavx512f) ;;
    esac
    gcc -std=c11 -O1 -fanalyzer -I. -D_POSIX_C_SOURCE=200809L -D_FILE_OFFSET_BITS=64 "${isa[@]}" \
        -c "$1" -o /dev/null 2>&1 | grep -E "warning:|error:" || true
}
export -f tidy analyze

cppcheck --std=c11 --language=c --enable=warning,performance,portability -q -j "$(nproc)" -I. \
    --suppress=missingIncludeSystem --template='{file}:{line}: {message} [{id}]' \
    base formats >"$scratch/cppcheck" 2>&1
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'tidy {}' >"$scratch/tidy"
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'analyze {}' >"$scratch/gcc"
rc=0
for tool in cppcheck tidy gcc; do
    sort -u "$scratch/$tool" >"$scratch/found"
    echo "$tool: ${#sources[@]} files, $(wc -l <"$scratch/found") findings"
    [ ! -s "$scratch/found" ] || { cat "$scratch/found"; rc=1; }
done
exit "$rc"
