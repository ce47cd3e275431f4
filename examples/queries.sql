-- What to ask a run, with DuckDB: duckdb < examples/queries.sql, or one at a time with `bulkrun query out/summaries "..."`
-- (there the view `results` is the same as the glob). All of them work while the run is still going on.

-- How long are the answers, and how did they end?
SELECT finish_reason, count(*) AS rows, round(avg(completion_tokens), 1) AS tokens
FROM 'out/summaries/*.parquet' GROUP BY ALL ORDER BY rows DESC;

-- What went wrong, and where?
SELECT error_code, count(*) AS rows, any_value(error_message) AS example
FROM 'out/summaries/*.parquet' WHERE error_code IS NOT NULL GROUP BY ALL;

-- The answers beside their input, in input order.
SELECT row, module, name, response
FROM 'out/summaries/*.parquet' WHERE error_code IS NULL ORDER BY row LIMIT 10;

-- What each part says of itself in its footer: run, shard, rows, tokens, versions.
SELECT file_name, decode(value)::JSON ->> 'shard' AS shard, decode(value)::JSON ->> 'rows' AS rows
FROM parquet_kv_metadata('out/summaries/*.parquet') WHERE decode(key) = 'bulkrun.part';
