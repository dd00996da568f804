-- Servers that share this database. Times are milliseconds of the database's own clock.
CREATE TABLE servers (
    server_id  TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    -- Where the other servers reach it.
    address    TEXT             NOT NULL,
    host       TEXT             NOT NULL,
    -- The boot and the process namespace that the process id belongs to.
    machine    TEXT             NOT NULL,
    pid        BIGINT           NOT NULL,
    version    TEXT             NOT NULL,
    started_at BIGINT           NOT NULL,
    -- Written every two seconds; half of each page is left free, so that a new version of the row finds room beside it.
    last_seen  BIGINT           NOT NULL
) WITH (fillfactor = 50);

-- Which of them may write. Each transaction of a server locks its row here against deletion. A server that is declared dead
-- loses its row and never gets it back, since an id is never used twice.
CREATE TABLE server_leases (
    server_id TEXT COLLATE "C" NOT NULL PRIMARY KEY
);

-- Which server runs a session and all that it started, by the id of the first of them. Without a row nobody does.
CREATE TABLE session_owners (
    root_id   TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    server_id TEXT COLLATE "C" NOT NULL
);
CREATE INDEX session_owners_by_server ON session_owners (server_id);

-- A code made with the key that the servers share, so that one with another key is refused.
CREATE TABLE cluster_key (
    name        TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    fingerprint TEXT             NOT NULL
);
