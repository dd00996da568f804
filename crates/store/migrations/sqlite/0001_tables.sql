-- Times are milliseconds since 1970, JSON is text. Everything here is plain SQL that PostgreSQL takes too.

-- The last number given out for each log; a number is never given out twice.
CREATE TABLE counters (
    name  TEXT   NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL
);

CREATE TABLE tokens (
    token_id   TEXT   NOT NULL PRIMARY KEY,
    name       TEXT   NOT NULL,
    scope      TEXT   NOT NULL,
    project_id TEXT,
    session_id TEXT,
    hash       TEXT   NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT
);
CREATE INDEX tokens_by_project ON tokens (project_id, token_id);
CREATE INDEX tokens_by_session ON tokens (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE projects (
    project_id        TEXT   NOT NULL PRIMARY KEY,
    name              TEXT   NOT NULL,
    -- The name in lower case, for searching: LOWER() differs between databases outside ASCII.
    name_folded       TEXT   NOT NULL,
    description       TEXT   NOT NULL,
    agent             TEXT,
    env               TEXT   NOT NULL,
    api_key_scope     TEXT,
    sandbox           TEXT   NOT NULL,
    limits            TEXT   NOT NULL,
    default_workspace TEXT   NOT NULL,
    created_at        BIGINT NOT NULL,
    updated_at        BIGINT NOT NULL
);

CREATE TABLE workspaces (
    workspace_id TEXT   NOT NULL PRIMARY KEY,
    project_id   TEXT   NOT NULL REFERENCES projects (project_id),
    name         TEXT   NOT NULL,
    env          TEXT   NOT NULL,
    source       TEXT,
    created_at   BIGINT NOT NULL
);
CREATE INDEX workspaces_by_project ON workspaces (project_id, created_at, workspace_id);

CREATE TABLE sessions (
    session_id    TEXT   NOT NULL PRIMARY KEY,
    project_id    TEXT   NOT NULL REFERENCES projects (project_id),
    workspace_id  TEXT   NOT NULL,
    agent         TEXT   NOT NULL,
    status        TEXT   NOT NULL,
    reason        TEXT,
    parent_id     TEXT,
    root_id       TEXT   NOT NULL,
    depth         BIGINT NOT NULL,
    turn          BIGINT NOT NULL,
    created_at    BIGINT NOT NULL,
    updated_at    BIGINT NOT NULL,
    created_by    TEXT,
    title         TEXT,
    agent_session TEXT,
    isolation     TEXT
);
CREATE INDEX sessions_by_project ON sessions (project_id, session_id);
CREATE INDEX sessions_by_status ON sessions (status, session_id);
CREATE INDEX sessions_by_parent ON sessions (parent_id, session_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_by_root ON sessions (root_id, session_id);
CREATE INDEX sessions_active ON sessions (project_id, session_id) WHERE status NOT IN ('ended', 'failed');

-- Events carry a small number instead of their session's id: half the size of the log, twice the speed.
CREATE TABLE event_logs (
    session_id TEXT   NOT NULL PRIMARY KEY,
    log        BIGINT NOT NULL UNIQUE
);
CREATE TABLE events (
    log  BIGINT NOT NULL,
    idx  BIGINT NOT NULL,
    ts   BIGINT NOT NULL,
    body TEXT   NOT NULL,
    PRIMARY KEY (log, idx)
);

CREATE TABLE debug_events (
    idx        BIGINT NOT NULL PRIMARY KEY,
    ts         BIGINT NOT NULL,
    session_id TEXT,
    agent      TEXT,
    project_id TEXT,
    kind       TEXT   NOT NULL,
    body       TEXT   NOT NULL
);
CREATE INDEX debug_events_by_session ON debug_events (session_id, idx) WHERE session_id IS NOT NULL;
CREATE INDEX debug_events_by_project ON debug_events (project_id, idx) WHERE project_id IS NOT NULL;

CREATE TABLE memory (
    session_id TEXT   NOT NULL,
    agent      TEXT   NOT NULL,
    seq        BIGINT NOT NULL,
    entry      TEXT   NOT NULL,
    PRIMARY KEY (session_id, agent, seq)
);

CREATE TABLE audit (
    idx        BIGINT NOT NULL PRIMARY KEY,
    ts         BIGINT NOT NULL,
    token_id   TEXT,
    session_id TEXT,
    project_id TEXT,
    action     TEXT   NOT NULL,
    target     TEXT,
    outcome    TEXT   NOT NULL,
    detail     TEXT
);
CREATE INDEX audit_by_project ON audit (project_id, idx) WHERE project_id IS NOT NULL;
CREATE INDEX audit_by_token ON audit (token_id, idx) WHERE token_id IS NOT NULL;
CREATE INDEX audit_by_session ON audit (session_id, idx) WHERE session_id IS NOT NULL;

-- What a deleted project leaves behind; taken away piece by piece, so that nobody waits for it.
CREATE TABLE purge_events (
    log BIGINT NOT NULL PRIMARY KEY
);
CREATE TABLE purge_debug (
    project_id TEXT NOT NULL PRIMARY KEY
);
