-- Agents and catalog entries. Used on PostgreSQL; here rows are only what was copied or restored from there, until the
-- server writes them out as files. A change takes a number of the counter 'definitions', which every definition it touches
-- gets as its version.
CREATE TABLE definitions (
    kind       TEXT   NOT NULL,
    id         TEXT   NOT NULL,
    version    BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (kind, id)
);

-- Their files. Content is base64, because a file may hold any bytes.
CREATE TABLE definition_files (
    kind    TEXT   NOT NULL,
    id      TEXT   NOT NULL,
    path    TEXT   NOT NULL,
    mode    BIGINT NOT NULL,
    content TEXT   NOT NULL,
    PRIMARY KEY (kind, id, path),
    FOREIGN KEY (kind, id) REFERENCES definitions (kind, id) ON DELETE CASCADE
);
