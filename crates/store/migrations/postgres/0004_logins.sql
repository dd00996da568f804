-- The console's logins, so that a browser stays logged in over a restart. Only hashes, as for tokens.
CREATE TABLE logins (
    hash       TEXT COLLATE "C"   NOT NULL PRIMARY KEY,
    token_id   TEXT COLLATE "C"   NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE INDEX logins_by_age ON logins (created_at);
