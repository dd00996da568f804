-- In how many of the turns that a row is about its model answered. Rows of tool calls and turns have a model now, if one made them.
ALTER TABLE usage ADD COLUMN model_turns BIGINT NOT NULL DEFAULT 0;
