#!/bin/sh
# Starts a PostgreSQL of its own for tests: on a Unix socket in a temporary directory, with a superuser `oubliette`.
# Prints `ready DIR`, where DIR has the socket, and serves until its standard input is closed; then everything is
# removed. So nothing is left behind, however its parent ends. Prints `missing: …` if PostgreSQL is not installed.
# Arguments are settings (NAME=VALUE) that differ from those below. A line `start` on standard input starts a server again
# that was stopped or killed, and is answered with `ready DIR` too.
set -eu
bin=$(ls -d /usr/lib/postgresql/*/bin /usr/pgsql-*/bin 2>/dev/null | sort -V | tail -1)
if [ -z "$bin" ]; then
    bin=$(dirname "$(command -v initdb || echo missing)")
fi
if [ ! -x "$bin/initdb" ]; then
    echo "missing: PostgreSQL 15 or later (apt-get install postgresql)"
    exit 0
fi
# Short, because the path of a socket has at most 107 bytes.
dir=$(mktemp -d /tmp/oubliette-pg.XXXXXX)
chmod 755 "$dir"
as=
if [ "$(id -u)" = 0 ]; then
    # PostgreSQL refuses to run as root.
    chown postgres "$dir"
    as="setpriv --reuid=postgres --regid=postgres --clear-groups"
fi
pid=
cleanup() {
    trap - EXIT INT TERM
    [ -z "$pid" ] || kill -QUIT "$pid" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$dir"
}
trap cleanup EXIT INT TERM
# A collation that is not that of bytes, so that a column that was meant to be compared byte by byte and is not is found.
# Nothing of a test has to survive a power cut, so nothing waits for the disk.
cd "$dir"
if ! $as "$bin/initdb" -D "$dir/data" -U oubliette --auth=trust --encoding=UTF8 --locale-provider=icu \
    --icu-locale=en-US --locale=C.UTF-8 --no-sync >"$dir/initdb.log" 2>&1; then
    cat "$dir/initdb.log"
    exit 1
fi
cat >>"$dir/data/postgresql.conf" <<CONF
listen_addresses = ''
unix_socket_directories = '$dir'
fsync = off
full_page_writes = off
max_connections = 300
shared_buffers = 64MB
log_min_messages = fatal
CONF
# One user needs a password; no one else does.
echo 'local all guarded scram-sha-256' | cat - "$dir/data/pg_hba.conf" >"$dir/pg_hba.conf"
echo "hba_file = '$dir/pg_hba.conf'" >>"$dir/data/postgresql.conf"
for setting in "$@"; do
    echo "${setting%%=*} = '${setting#*=}'" >>"$dir/data/postgresql.conf"
done
serve() {
    $as "$bin/postgres" -D "$dir/data" >>"$dir/log" 2>&1 </dev/null &
    pid=$!
    tries=0
    until "$bin/pg_isready" -q -h "$dir" -U oubliette -d postgres; do
        tries=$((tries + 1))
        if [ "$tries" -gt 300 ] || ! kill -0 "$pid" 2>/dev/null; then
            cat "$dir/log"
            exit 1
        fi
        sleep 0.1
    done
    echo "ready $dir"
}
serve
while read -r command; do
    if [ "$command" = start ]; then
        # Until it is waited for, a killed server counts as one that runs, and its files as in use.
        wait "$pid" 2>/dev/null || true
        serve
    fi
done
