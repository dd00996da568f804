-- Whether a session without a workspace works in the project's default one or in a new one of its own.
ALTER TABLE projects ADD COLUMN workspaces TEXT NOT NULL DEFAULT 'shared';

-- Sessions that are not active, by when they last changed: what retention looks through.
CREATE INDEX sessions_finished ON sessions (updated_at) WHERE status IN ('ended', 'failed');

-- Sessions that were deleted and whose debugger events are taken away piece by piece.
CREATE TABLE purge_session_debug (
    session_id TEXT NOT NULL PRIMARY KEY
);

-- Audit entries older than this time may be deleted. The row is there only within the transaction of a retention.
CREATE TABLE audit_expiry (
    before BIGINT NOT NULL
);
DROP TRIGGER audit_never_shrinks;
CREATE TRIGGER audit_never_shrinks BEFORE DELETE ON audit
WHEN NOT EXISTS (SELECT 1 FROM audit_expiry WHERE OLD.ts < before)
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append only');
END;
