# Shared by scripts/test.sh and scripts/quickstart.sh (sourced, from the repository's root): system packages and .venv.
# shellcheck shell=bash

say() { printf '== %s\n' "$*"; }

die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A Python of at least 3.10 that can make virtual environments, as $python.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$candidate
            return 0
        fi
    done
    return 1
}

# Whether extensions can be built for $python: a compiler, its C library, Python's headers.
can_build() {
    printf '#include <Python.h>\n' |
        "${CC:-cc}" -I"$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" -E - >/dev/null 2>&1
}

has_xxhash() { printf '#include <xxhash.h>\n' | "${CC:-cc}" -E - >/dev/null 2>&1; }

# Runs a command; its output is shown only when it fails.
quietly() {
    local output
    output=$("$@" 2>&1) || { printf '%s\n' "$output" >&2 && return 1; }
}

# Debian packages that the build needs, installed when root, named when not.
prepare_system() {
    local missing=() needs_python=""
    if ! find_python; then
        needs_python=yes
        missing+=(python3 python3-venv python3-dev)
    elif [ ! -x .venv/bin/python ] && ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        needs_python=yes
        missing+=(python3-venv)
    fi
    command -v "${CC:-cc}" >/dev/null 2>&1 || missing+=(gcc libc6-dev)
    if [ -n "${python:-}" ] && ! can_build; then
        missing+=(libc6-dev python3-dev)
    fi
    has_xxhash || missing+=(libxxhash-dev)
    if [ ${#missing[@]} -gt 0 ]; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            say "installing ${missing[*]}"
            quietly apt-get update || die "apt-get update failed: is there a network?"
            DEBIAN_FRONTEND=noninteractive quietly apt-get install --no-install-recommends -y "${missing[@]}" ||
                die "apt-get could not install ${missing[*]}"
        elif [ -n "$needs_python" ]; then
            die "missing: ${missing[*]}. As root: apt-get install ${missing[*]}"
        else
            say "missing: ${missing[*]}; the copy engine will do without (as root: apt-get install ${missing[*]})"
        fi
    fi
    find_python || die "no Python of at least 3.10 found; set PYTHON=/path/to/python3"
}

# prepare_venv EXTRAS: .venv with baftd (editable) and these extras, at the versions of scripts/constraints.txt.
# pip's own configuration and variables apply: PIP_EXTRA_INDEX_URL can name an index with a smaller, CPU-only torch.
prepare_venv() {
    local extras=$1 stamp=.venv/.baftd-prepared inputs had_extras="" had_inputs="" extra
    if [ ! -x .venv/bin/python ]; then
        say "making the virtual environment .venv ($("$python" --version 2>&1))"
        "$python" -m venv .venv
    fi
    # Anything that changes what is installed or built changes this line, a compiler that was not there before included.
    inputs=$(cat pyproject.toml scripts/constraints.txt clients/baft_client/*.[ch] | cksum)
    can_build && inputs+=" compiler" && has_xxhash && inputs+=" xxhash"
    if [ -e "$stamp" ]; then
        { read -r had_extras && read -r had_inputs; } <"$stamp" || true
    fi
    # What another script has installed stays: the extras only grow.
    for extra in ${had_extras//,/ }; do
        [[ ",$extras," == *",$extra,"* ]] || extras+=",$extra"
    done
    for extra in ${extras//,/ }; do
        [[ ",$had_extras," == *",$extra,"* ]] || had_inputs="" # one that is new
    done
    if [ "$had_inputs" != "$inputs" ] || ! .venv/bin/python -c 'import baft_client' 2>/dev/null; then
        say "installing baftd[$extras] and what it needs into .venv (the first time this takes some minutes)"
        .venv/bin/python -m pip install -qq --disable-pip-version-check --progress-bar off \
            --constraint scripts/constraints.txt --editable ".[$extras]" ||
            die "pip could not install baftd[$extras]: see above"
        printf '%s\n' "$extras" "$inputs" >"$stamp"
        .venv/bin/python -c 'import baft_client._engine' 2>/dev/null ||
            say "the native copy engine was not built (compiler or headers missing); the Python one is used"
    fi
}
