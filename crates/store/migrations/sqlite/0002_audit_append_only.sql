-- The audit log only grows. Trigger bodies are the one thing each database writes its own way.
CREATE TRIGGER audit_never_changes BEFORE UPDATE ON audit
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append only');
END;

CREATE TRIGGER audit_never_shrinks BEFORE DELETE ON audit
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append only');
END;
