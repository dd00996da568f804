-- Agents and catalog entries. A change takes a number of the counter 'definitions', which every definition it touches gets as
-- its version.
CREATE TABLE definitions (
    kind       TEXT COLLATE "C" NOT NULL,
    id         TEXT COLLATE "C" NOT NULL,
    version    BIGINT           NOT NULL,
    updated_at BIGINT           NOT NULL,
    PRIMARY KEY (kind, id)
);

-- Their files. Content is base64, because a file may hold any bytes.
CREATE TABLE definition_files (
    kind    TEXT COLLATE "C" NOT NULL,
    id      TEXT COLLATE "C" NOT NULL,
    path    TEXT COLLATE "C" NOT NULL,
    mode    BIGINT           NOT NULL,
    content TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (kind, id, path),
    FOREIGN KEY (kind, id) REFERENCES definitions (kind, id) ON DELETE CASCADE
);
