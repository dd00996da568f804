-- Whether a session without a workspace works in the project's default one or in a new one of its own.
ALTER TABLE projects ADD COLUMN workspaces TEXT COLLATE "C" NOT NULL DEFAULT 'shared';

-- Sessions that are not active, by when they last changed: what retention looks through.
CREATE INDEX sessions_finished ON sessions (updated_at) WHERE status IN ('ended', 'failed');

-- Sessions that were deleted and whose debugger events are taken away piece by piece.
CREATE TABLE purge_session_debug (
    session_id TEXT COLLATE "C" NOT NULL PRIMARY KEY
);

-- Audit entries older than this time may be deleted. The row is there only within the transaction of a retention.
CREATE TABLE audit_expiry (
    before BIGINT NOT NULL
);
CREATE FUNCTION refuse_audit_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM audit_expiry WHERE OLD.ts < before) THEN
        RAISE EXCEPTION 'the audit log is append only';
    END IF;
    RETURN OLD;
END;
$$;

DROP TRIGGER audit_never_changes ON audit;
CREATE TRIGGER audit_never_changes BEFORE UPDATE ON audit
    FOR EACH ROW EXECUTE FUNCTION refuse_audit_change();
CREATE TRIGGER audit_never_shrinks BEFORE DELETE ON audit
    FOR EACH ROW EXECUTE FUNCTION refuse_audit_deletion();
