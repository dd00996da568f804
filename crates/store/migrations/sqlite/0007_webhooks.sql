-- Events that a webhook has not taken yet, whole: they are delivered even if their session is deleted meanwhile.
CREATE TABLE webhook_outbox (
    webhook    TEXT   NOT NULL,
    session_id TEXT   NOT NULL,
    idx        BIGINT NOT NULL,
    body       TEXT   NOT NULL,
    created_at BIGINT NOT NULL,
    attempts   BIGINT NOT NULL,
    next_at    BIGINT NOT NULL,
    PRIMARY KEY (webhook, session_id, idx)
);
CREATE INDEX webhook_outbox_by_age ON webhook_outbox (webhook, created_at);

-- How a webhook fares, for the doctor.
CREATE TABLE webhook_state (
    webhook       TEXT   NOT NULL PRIMARY KEY,
    failing_since BIGINT,
    last_error    TEXT,
    dropped       BIGINT NOT NULL
);
