#!/bin/sh
# Installs Oubliette from the folder this script is in, after checking every file against SHA256SUMS.
#
#   ./install.sh [--prefix DIR]              programs, man pages and completions; default /usr/local
#   ./install.sh [--prefix DIR] --service    and the systemd unit, with a user of its own
#   ./install.sh [--prefix DIR] --uninstall  takes away what was installed; the home stays
#
# DESTDIR is put before every path, for who makes packages.
set -eu

prefix=/usr/local
service=no
uninstall=no
while [ $# -gt 0 ]; do
    case $1 in
        --prefix)
            [ $# -gt 1 ] || { echo "install.sh: --prefix needs a folder" >&2; exit 2; }
            prefix=$2
            shift
            ;;
        --service) service=yes ;;
        --uninstall) uninstall=yes ;;
        --help | -h)
            sed -n '2,8s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        *)
            echo "install.sh: unknown argument $1; try --help" >&2
            exit 2
            ;;
    esac
    shift
done
case $prefix in
    /*) ;;
    *) echo "install.sh: --prefix must be an absolute path" >&2; exit 2 ;;
esac
root=${DESTDIR:-}
unit=$root/etc/systemd/system/oubliette.service
[ "$prefix" = /usr ] && unit=$root/usr/lib/systemd/system/oubliette.service

cd "$(dirname "$0")"
files=$(find bin share -type f | LC_ALL=C sort)

if [ "$uninstall" = yes ]; then
    for file in $files; do
        rm -f "$root$prefix/$file"
    done
    rm -f "$unit"
    rmdir "$root$prefix/share/doc/oubliette/examples/prometheus" "$root$prefix/share/doc/oubliette/examples/grafana" \
        "$root$prefix/share/doc/oubliette/examples" "$root$prefix/share/doc/oubliette" 2>/dev/null || :
    echo "Oubliette is uninstalled. What it kept (its home) is still there."
    exit 0
fi

# Every file, before the first is copied: a half-checked installation is none.
if ! sha256sum --check --strict --quiet SHA256SUMS >&2; then
    echo "install.sh: files are not what SHA256SUMS says; nothing was installed. Fetch the tarball again." >&2
    exit 1
fi
for file in $files lib/systemd/system/oubliette.service; do
    if ! grep -q "  $file\$" SHA256SUMS; then
        echo "install.sh: $file is not in SHA256SUMS; nothing was installed. Fetch the tarball again." >&2
        exit 1
    fi
done

for file in $files; do
    mode=0644
    case $file in bin/*) mode=0755 ;; esac
    mkdir -p "$(dirname "$root$prefix/$file")"
    # Beside its place, then moved there: a running program keeps its file.
    install -m "$mode" "$file" "$root$prefix/$file.new"
    mv -f "$root$prefix/$file.new" "$root$prefix/$file"
done
echo "Installed into $prefix: $("$root$prefix/bin/oubliette" --version | head -n 1)"

if [ "$service" = yes ]; then
    if [ -z "$root" ] && ! id oubliette >/dev/null 2>&1; then
        useradd --system --home-dir /var/lib/oubliette --shell /usr/sbin/nologin oubliette
    fi
    mkdir -p "$(dirname "$unit")" "$root/etc/oubliette"
    chmod 0750 "$root/etc/oubliette"
    sed "s#/usr/bin/oubliette#$prefix/bin/oubliette#" lib/systemd/system/oubliette.service >"$unit"
    chmod 0644 "$unit"
    if [ -z "$root" ] && [ -d /run/systemd/system ]; then
        systemctl daemon-reload
    fi
    echo "Start it:           systemctl enable --now oubliette"
    echo "The first token:    sudo -u oubliette $prefix/bin/oubliette --home /var/lib/oubliette token create --name admin --scope admin"
else
    echo "Start it:           oubliette up"
fi
if ! command -v bwrap >/dev/null 2>&1; then
    echo "bubblewrap is missing, and no session can be started without it; for example: apt-get install bubblewrap" >&2
fi
