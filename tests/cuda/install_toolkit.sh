#!/usr/bin/env bash
# Debian's CUDA toolkit (11.8, which has sm_70) and the g++ it needs, as root or through sudo. It is in non-free: where no source has that, a file beside the existing ones repeats
# Debian's entries with contrib and non-free.
#   install_toolkit.sh                 install what is missing
#   install_toolkit.sh --entries FILE  print what would be added for one file of sources
set -euo pipefail

packages=(nvidia-cuda-toolkit g++-11)

# The entries of a file of sources, deb822 or one-line, for contrib and non-free instead of main.
entries() {
    case "$1" in
    *.sources) sed -E '/^#/d; s/^Components:.*/Components: contrib non-free/I' "$1" ;;
    *) sed -nE 's/^(deb +(\[[^]]*\] +)?[^ ]+ +[^ ]+) +.*\bmain\b.*/\1 contrib non-free/p' "$1" ;;
    esac
}

if [ "${1-}" = --entries ]; then
    entries "$2"
    exit
fi

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
        missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit
sudo=()
[ "$(id -u)" -eq 0 ] || sudo=(sudo)

candidate() { [[ $(apt-cache policy nvidia-cuda-toolkit) =~ Candidate:\ [0-9] ]]; }

"${sudo[@]}" apt-get update -q
if ! candidate; then
    parts=
    eval "$(apt-config shell parts Dir::Etc::sourceparts/d)"
    # shellcheck disable=SC2016 # apt's words, not the shell's
    apt-get indextargets --format '$(ORIGIN)|$(SOURCESENTRY)' 'Created-By: Packages' \
        'Component: main' | sed -nE 's/^Debian\|(.*):[0-9]+$/\1/p' | sort -u |
        while read -r file; do
            added=${parts}qconv-$(basename "$file")
            entries "$file" | "${sudo[@]}" tee "${added%.list}.${file##*.}" >/dev/null
        done
    "${sudo[@]}" apt-get update -q
    candidate || {
        echo "install_toolkit: no source of packages has nvidia-cuda-toolkit" >&2
        exit 1
    }
fi
DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -q -y --no-install-recommends \
    "${missing[@]}"
