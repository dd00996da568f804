-- Messages that were accepted and wait for their turn. A row goes when the message is in the session's log.
CREATE TABLE queue (
    session_id TEXT   NOT NULL,
    turn       BIGINT NOT NULL,
    text       TEXT   NOT NULL,
    PRIMARY KEY (session_id, turn)
);
