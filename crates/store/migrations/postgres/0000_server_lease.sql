-- Which server may write. The number grows with every server that takes the lease; each transaction checks it, so that
-- a server that lost the lease without noticing writes nothing any more.
CREATE TABLE server_lease (
    name       TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    epoch      BIGINT           NOT NULL,
    host       TEXT             NOT NULL,
    -- The boot and the process namespace that the process id belongs to.
    machine    TEXT             NOT NULL,
    pid        BIGINT           NOT NULL,
    version    TEXT             NOT NULL,
    taken_at   BIGINT           NOT NULL
);
