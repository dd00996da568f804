-- What sessions used: a row for each model request; tool calls and turns in rows of their own, without a model.
CREATE TABLE usage (
    usage_id      TEXT   NOT NULL PRIMARY KEY,
    ts            BIGINT NOT NULL,
    session_id    TEXT   NOT NULL,
    project_id    TEXT   NOT NULL,
    -- The other projects of the sessions above, separated by spaces: their budgets are charged too.
    charged_above TEXT,
    agent         TEXT   NOT NULL,
    token_id      TEXT,
    -- provider/model
    model         TEXT,
    requests      BIGINT NOT NULL,
    input_tokens  BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    -- Billionths of a US dollar.
    cost_nanos    BIGINT,
    estimated     BIGINT NOT NULL,
    tool_calls    BIGINT NOT NULL,
    turns         BIGINT NOT NULL
);
CREATE INDEX usage_by_time ON usage (ts);
CREATE INDEX usage_by_project ON usage (project_id, ts);
CREATE INDEX usage_by_session ON usage (session_id, ts);

-- The sums of each session, so that a list of sessions reads a row each.
CREATE TABLE session_usage (
    session_id    TEXT   NOT NULL PRIMARY KEY,
    requests      BIGINT NOT NULL,
    input_tokens  BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    cost_nanos    BIGINT,
    estimated     BIGINT NOT NULL
);
