#!/usr/bin/env bash
# Runs tests on AArch64, emulated by QEMU: in FOLDER, in a Debian made from Debian's packages. Needs
# root, and the wheel that `tox -e wheels` has written into dist/.
#
#     tests/aarch64.sh FOLDER [ARGUMENT OF PYTEST]...
set -euo pipefail
mkdir -p "${1:?the folder}"
folder=$(realpath "$1")
root=$folder/root
shift
cd "$(dirname "$0")/.."

if ! command -v debootstrap qemu-aarch64-static update-binfmts >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends binfmt-support debootstrap qemu-user-static
fi
binfmt=/proc/sys/fs/binfmt_misc
[[ -e $binfmt/register ]] || mount -t binfmt_misc binfmt_misc $binfmt
[[ -e $binfmt/qemu-aarch64 ]] || update-binfmts --enable qemu-aarch64

packages=ca-certificates,g++,git,libc6-dev,nginx-light,procps,python3,python3-venv,redis-server,strace
if [[ ! -e $root/usr/bin/gcc || -e $root/debootstrap ]]; then
    debootstrap --arch=arm64 --variant=minbase --include=$packages bookworm "$root"
fi
# Packages are fetched outside, where pip has its settings. obstore, of the extra `s3`, is left out, and
# async-timeout, which redis needs with this Python, is named: pip asks its own Python for that.
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'pip>=25.1'
rm -f "$folder"/wheels/kcache*
platforms=(manylinux2014_aarch64 manylinux_2_{17,28,31,34}_aarch64)
"$folder/venv/bin/pip" download -q -d "$folder/wheels" --only-binary=:all: --python-version 3.11.2 \
    "${platforms[@]/#/--platform=}" --group test --group nvcc \
    async-timeout "$(ls dist/*aarch64.whl)[cu13,cli,demo,http,launch,redis,signing,testing]"

cp /etc/hosts "$root/etc/" # with localhost
rm -rf "$root/kcache" "$root/wheels"
mkdir "$root/kcache"
cp -r "$folder/wheels" "$root/wheels"
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$root/kcache"
# What is mounted here is gone with this shell: the folder can be deleted.
exec unshare --mount sh -euc '
    root=$1
    shift
    mount --bind "$root" "$root" # so that the table of mounts has the root, as on every machine
    for mounted in proc sys dev; do mount --rbind "/$mounted" "$root/$mounted"; done
    exec chroot "$root" sh -euc "$@"
' sh "$root" '
    cd /kcache
    [ -e /venv ] || python3 -m venv /venv
    /venv/bin/pip install -q --no-index --no-compile /wheels/*
    /venv/bin/pip install -q --no-index --no-compile --no-deps --force-reinstall /wheels/kcache*
    # Workers write no compiled modules, and would compile their own at each start.
    /venv/bin/python3 -I -m compileall -q /venv/lib/python3*/site-packages/kcache
    export PYTHONSAFEPATH=1 TEST_NVRTC_MAJOR=13 TEST_EMULATED=1
    exec /venv/bin/pytest -p no:cacheprovider -o timeout=1200 "$@"
' sh "$@"
