-- Times are milliseconds since 1970, JSON is text. Text is compared byte by byte, as SQLite does.

-- The last number given out for each log; a number is never given out twice.
CREATE TABLE counters (
    name  TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL
);

CREATE TABLE tokens (
    token_id   TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    name       TEXT COLLATE "C"   NOT NULL,
    scope      TEXT COLLATE "C"   NOT NULL,
    project_id TEXT COLLATE "C",
    session_id TEXT COLLATE "C",
    hash       TEXT COLLATE "C"   NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT
);
CREATE INDEX tokens_by_project ON tokens (project_id, token_id);
CREATE INDEX tokens_by_session ON tokens (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE projects (
    project_id        TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    name              TEXT COLLATE "C"   NOT NULL,
    -- The name in lower case, for searching: LOWER() differs between databases outside ASCII.
    name_folded       TEXT COLLATE "C"   NOT NULL,
    description       TEXT COLLATE "C"   NOT NULL,
    agent             TEXT COLLATE "C",
    env               TEXT COLLATE "C"   NOT NULL,
    api_key_scope     TEXT COLLATE "C",
    sandbox           TEXT COLLATE "C"   NOT NULL,
    limits            TEXT COLLATE "C"   NOT NULL,
    default_workspace TEXT COLLATE "C"   NOT NULL,
    created_at        BIGINT NOT NULL,
    updated_at        BIGINT NOT NULL
);

CREATE TABLE workspaces (
    workspace_id TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    project_id   TEXT COLLATE "C"   NOT NULL REFERENCES projects (project_id),
    name         TEXT COLLATE "C"   NOT NULL,
    env          TEXT COLLATE "C"   NOT NULL,
    source       TEXT COLLATE "C",
    created_at   BIGINT NOT NULL
);
CREATE INDEX workspaces_by_project ON workspaces (project_id, created_at, workspace_id);

CREATE TABLE sessions (
    session_id    TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    project_id    TEXT COLLATE "C"   NOT NULL REFERENCES projects (project_id),
    workspace_id  TEXT COLLATE "C"   NOT NULL,
    agent         TEXT COLLATE "C"   NOT NULL,
    status        TEXT COLLATE "C"   NOT NULL,
    reason        TEXT COLLATE "C",
    parent_id     TEXT COLLATE "C",
    root_id       TEXT COLLATE "C"   NOT NULL,
    depth         BIGINT NOT NULL,
    turn          BIGINT NOT NULL,
    created_at    BIGINT NOT NULL,
    updated_at    BIGINT NOT NULL,
    created_by    TEXT COLLATE "C",
    title         TEXT COLLATE "C",
    agent_session TEXT COLLATE "C",
    isolation     TEXT COLLATE "C"
);
CREATE INDEX sessions_by_project ON sessions (project_id, session_id);
CREATE INDEX sessions_by_status ON sessions (status, session_id);
CREATE INDEX sessions_by_parent ON sessions (parent_id, session_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_by_root ON sessions (root_id, session_id);
CREATE INDEX sessions_active ON sessions (project_id, session_id) WHERE status NOT IN ('ended', 'failed');

-- Events carry a small number instead of their session's id: half the size of the log, twice the speed.
CREATE TABLE event_logs (
    session_id TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    log        BIGINT NOT NULL UNIQUE
);
CREATE TABLE events (
    log  BIGINT NOT NULL,
    idx  BIGINT NOT NULL,
    ts   BIGINT NOT NULL,
    body TEXT COLLATE "C"   NOT NULL,
    PRIMARY KEY (log, idx)
);

CREATE TABLE debug_events (
    idx        BIGINT NOT NULL PRIMARY KEY,
    ts         BIGINT NOT NULL,
    session_id TEXT COLLATE "C",
    agent      TEXT COLLATE "C",
    project_id TEXT COLLATE "C",
    kind       TEXT COLLATE "C"   NOT NULL,
    body       TEXT COLLATE "C"   NOT NULL
);
CREATE INDEX debug_events_by_session ON debug_events (session_id, idx) WHERE session_id IS NOT NULL;
CREATE INDEX debug_events_by_project ON debug_events (project_id, idx) WHERE project_id IS NOT NULL;

CREATE TABLE memory (
    session_id TEXT COLLATE "C"   NOT NULL,
    agent      TEXT COLLATE "C"   NOT NULL,
    seq        BIGINT NOT NULL,
    entry      TEXT COLLATE "C"   NOT NULL,
    PRIMARY KEY (session_id, agent, seq)
);

CREATE TABLE audit (
    idx        BIGINT NOT NULL PRIMARY KEY,
    ts         BIGINT NOT NULL,
    token_id   TEXT COLLATE "C",
    session_id TEXT COLLATE "C",
    project_id TEXT COLLATE "C",
    action     TEXT COLLATE "C"   NOT NULL,
    target     TEXT COLLATE "C",
    outcome    TEXT COLLATE "C"   NOT NULL,
    detail     TEXT COLLATE "C"
);
CREATE INDEX audit_by_project ON audit (project_id, idx) WHERE project_id IS NOT NULL;
CREATE INDEX audit_by_token ON audit (token_id, idx) WHERE token_id IS NOT NULL;
CREATE INDEX audit_by_session ON audit (session_id, idx) WHERE session_id IS NOT NULL;

-- What a deleted project leaves behind; taken away piece by piece, so that nobody waits for it.
CREATE TABLE purge_events (
    log BIGINT NOT NULL PRIMARY KEY
);
CREATE TABLE purge_debug (
    project_id TEXT COLLATE "C" NOT NULL PRIMARY KEY
);
