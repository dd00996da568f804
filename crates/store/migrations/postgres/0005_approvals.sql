-- Calls that wait, or waited, for a person to allow them.
CREATE TABLE approvals (
    approval_id  TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    session_id   TEXT COLLATE "C"   NOT NULL,
    project_id   TEXT COLLATE "C"   NOT NULL,
    agent        TEXT COLLATE "C"   NOT NULL,
    tool         TEXT COLLATE "C"   NOT NULL,
    canonical    TEXT COLLATE "C"   NOT NULL,
    source       TEXT COLLATE "C"   NOT NULL,
    arguments    TEXT COLLATE "C"   NOT NULL,
    rule         TEXT COLLATE "C"   NOT NULL,
    status       TEXT COLLATE "C"   NOT NULL,
    requested_at BIGINT NOT NULL,
    expires_at   BIGINT NOT NULL,
    decided_at   BIGINT,
    decided_by   TEXT COLLATE "C",
    reason       TEXT COLLATE "C",
    -- 'session' if later calls of the session that meet the same rule pass.
    remember     TEXT COLLATE "C"
);
CREATE INDEX approvals_by_session ON approvals (session_id, approval_id);
CREATE INDEX approvals_by_project ON approvals (project_id, approval_id);
CREATE INDEX approvals_by_status ON approvals (status, approval_id);
CREATE INDEX approvals_by_project_status ON approvals (project_id, status, approval_id);
CREATE INDEX approvals_pending ON approvals (session_id, approval_id) WHERE status = 'pending';
CREATE INDEX approvals_remembered ON approvals (session_id) WHERE remember IS NOT NULL;
