-- Calls that wait, or waited, for a person to allow them.
CREATE TABLE approvals (
    approval_id  TEXT   NOT NULL PRIMARY KEY,
    session_id   TEXT   NOT NULL,
    project_id   TEXT   NOT NULL,
    agent        TEXT   NOT NULL,
    tool         TEXT   NOT NULL,
    canonical    TEXT   NOT NULL,
    source       TEXT   NOT NULL,
    arguments    TEXT   NOT NULL,
    rule         TEXT   NOT NULL,
    status       TEXT   NOT NULL,
    requested_at BIGINT NOT NULL,
    expires_at   BIGINT NOT NULL,
    decided_at   BIGINT,
    decided_by   TEXT,
    reason       TEXT,
    -- 'session' if later calls of the session that meet the same rule pass.
    remember     TEXT
);
CREATE INDEX approvals_by_session ON approvals (session_id, approval_id);
CREATE INDEX approvals_by_project ON approvals (project_id, approval_id);
CREATE INDEX approvals_by_status ON approvals (status, approval_id);
CREATE INDEX approvals_by_project_status ON approvals (project_id, status, approval_id);
CREATE INDEX approvals_pending ON approvals (session_id, approval_id) WHERE status = 'pending';
CREATE INDEX approvals_remembered ON approvals (session_id) WHERE remember IS NOT NULL;
