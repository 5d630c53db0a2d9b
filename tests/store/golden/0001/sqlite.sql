CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE nodes (
	id VARCHAR NOT NULL,
	role VARCHAR NOT NULL,
	host VARCHAR NOT NULL,
	started_ns INTEGER NOT NULL,
	seen_ns INTEGER NOT NULL,
	version VARCHAR NOT NULL,
	CONSTRAINT pk_nodes PRIMARY KEY (id)
);
CREATE TABLE tenants (
	id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	created_ns INTEGER NOT NULL,
	CONSTRAINT pk_tenants PRIMARY KEY (id),
	CONSTRAINT uq_tenants_name UNIQUE (name)
);
CREATE TABLE imports (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	state VARCHAR NOT NULL,
	options JSON NOT NULL,
	files JSON NOT NULL,
	progress FLOAT NOT NULL,
	phase VARCHAR,
	error VARCHAR,
	job_id VARCHAR,
	window_id VARCHAR,
	created_ns INTEGER NOT NULL,
	finished_ns INTEGER,
	owner VARCHAR,
	fence INTEGER NOT NULL,
	lease_ns INTEGER NOT NULL,
	tries INTEGER NOT NULL,
	CONSTRAINT pk_imports PRIMARY KEY (id),
	CONSTRAINT fk_imports_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_imports_created_ns ON imports (created_ns);
CREATE INDEX ix_imports_state ON imports (state);
CREATE INDEX ix_imports_tenant_id ON imports (tenant_id);
CREATE TABLE jobs (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	created_ns INTEGER NOT NULL,
	last_data_ns INTEGER NOT NULL,
	pinned BOOLEAN NOT NULL,
	CONSTRAINT pk_jobs PRIMARY KEY (id),
	CONSTRAINT fk_jobs_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT uq_jobs_tenant_id UNIQUE (tenant_id, name)
);
CREATE INDEX ix_jobs_last_data_ns ON jobs (last_data_ns);
CREATE INDEX ix_jobs_tenant_id ON jobs (tenant_id);
CREATE TABLE tasks (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	"key" VARCHAR NOT NULL,
	kind VARCHAR NOT NULL,
	options JSON NOT NULL,
	state VARCHAR NOT NULL,
	error VARCHAR,
	path VARCHAR,
	created_ns INTEGER NOT NULL,
	finished_ns INTEGER,
	owner VARCHAR,
	fence INTEGER NOT NULL,
	lease_ns INTEGER NOT NULL,
	tries INTEGER NOT NULL,
	CONSTRAINT pk_tasks PRIMARY KEY (id),
	CONSTRAINT fk_tasks_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT uq_tasks_tenant_id UNIQUE (tenant_id, "key")
);
CREATE INDEX ix_tasks_state ON tasks (state);
CREATE INDEX ix_tasks_tenant_id ON tasks (tenant_id);
CREATE TABLE tokens (
	kid VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	sha256 VARCHAR NOT NULL,
	scopes VARCHAR NOT NULL,
	created_ns INTEGER NOT NULL,
	expires_ns INTEGER,
	revoked_ns INTEGER,
	last_used_ns INTEGER,
	CONSTRAINT pk_tokens PRIMARY KEY (kid),
	CONSTRAINT fk_tokens_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_tokens_tenant_id ON tokens (tenant_id);
CREATE TABLE attempts (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	number INTEGER NOT NULL,
	dp INTEGER NOT NULL,
	pp INTEGER NOT NULL,
	tp INTEGER NOT NULL,
	cp INTEGER NOT NULL,
	ep INTEGER NOT NULL,
	vpp INTEGER NOT NULL,
	mode VARCHAR NOT NULL,
	time_base VARCHAR NOT NULL,
	window_steps INTEGER NOT NULL,
	notes JSON NOT NULL,
	created_ns INTEGER NOT NULL,
	last_data_ns INTEGER NOT NULL,
	ended_ns INTEGER,
	end_reason VARCHAR,
	revision INTEGER NOT NULL,
	ready_step INTEGER,
	live_step INTEGER,
	live_owner VARCHAR,
	live_fence INTEGER NOT NULL,
	live_lease_ns INTEGER NOT NULL,
	live_analysed_ns INTEGER,
	live_verdict VARCHAR,
	live_slowdown FLOAT,
	live_waste_ratio FLOAT,
	live_recorded_s FLOAT,
	live_ideal_s FLOAT,
	live_aligned BOOLEAN,
	live_coverage_ratio FLOAT,
	live_report BLOB,
	live_workers BLOB,
	CONSTRAINT pk_attempts PRIMARY KEY (id),
	CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_attempts_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT uq_attempts_job_id UNIQUE (job_id, number)
);
CREATE INDEX ix_attempts_job_id ON attempts (job_id);
CREATE INDEX ix_attempts_last_data_ns ON attempts (last_data_ns);
CREATE INDEX ix_attempts_tenant_id ON attempts (tenant_id);
CREATE TABLE findings (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	attempt_id VARCHAR NOT NULL,
	"key" VARCHAR NOT NULL,
	source VARCHAR NOT NULL,
	state VARCHAR NOT NULL,
	verdict VARCHAR NOT NULL,
	cause VARCHAR NOT NULL,
	scope VARCHAR NOT NULL,
	severity VARCHAR NOT NULL,
	rank INTEGER,
	dp INTEGER,
	stage INTEGER,
	host VARCHAR,
	gpu_uuid VARCHAR,
	excess_s FLOAT,
	excess_share FLOAT,
	onset_step INTEGER,
	opened_step INTEGER NOT NULL,
	opened_ns INTEGER NOT NULL,
	last_step INTEGER NOT NULL,
	last_ns INTEGER NOT NULL,
	cleared_step INTEGER,
	cleared_ns INTEGER,
	document JSON NOT NULL,
	CONSTRAINT pk_findings PRIMARY KEY (id),
	CONSTRAINT fk_findings_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_findings_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_findings_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_findings_gpu_uuid ON findings (gpu_uuid);
CREATE INDEX ix_findings_host ON findings (host);
CREATE INDEX ix_findings_job_id ON findings (job_id);
CREATE INDEX ix_findings_last_ns ON findings (last_ns);
CREATE INDEX ix_findings_life ON findings (attempt_id, state, "key");
CREATE INDEX ix_findings_tenant_id ON findings (tenant_id);
CREATE TABLE steps (
	attempt_id VARCHAR NOT NULL,
	step INTEGER NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	recorded_s FLOAT,
	simulated_s FLOAT,
	ideal_s FLOAT,
	slowdown FLOAT,
	skipped VARCHAR,
	start_ns INTEGER,
	analysed_ns INTEGER NOT NULL,
	CONSTRAINT pk_steps PRIMARY KEY (attempt_id, step),
	CONSTRAINT fk_steps_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_steps_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_steps_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_steps_job_id ON steps (job_id);
CREATE TABLE streams (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	attempt_id VARCHAR NOT NULL,
	"key" VARCHAR NOT NULL,
	host VARCHAR NOT NULL,
	source VARCHAR NOT NULL,
	ranks JSON NOT NULL,
	epoch INTEGER NOT NULL,
	steps_done INTEGER,
	ended BOOLEAN NOT NULL,
	end_reason VARCHAR,
	events INTEGER NOT NULL,
	lost_events INTEGER NOT NULL,
	created_ns INTEGER NOT NULL,
	last_data_ns INTEGER NOT NULL,
	heartbeat_ns INTEGER,
	heartbeat JSON,
	CONSTRAINT pk_streams PRIMARY KEY (id),
	CONSTRAINT fk_streams_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_streams_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_streams_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT uq_streams_tenant_id UNIQUE (tenant_id, "key")
);
CREATE INDEX ix_streams_attempt_id ON streams (attempt_id);
CREATE INDEX ix_streams_host ON streams (host);
CREATE INDEX ix_streams_job_id ON streams (job_id);
CREATE INDEX ix_streams_tenant_id ON streams (tenant_id);
CREATE TABLE windows (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	attempt_id VARCHAR NOT NULL,
	kind VARCHAR NOT NULL,
	number INTEGER NOT NULL,
	first_step INTEGER NOT NULL,
	last_step INTEGER NOT NULL,
	rows INTEGER NOT NULL,
	state VARCHAR NOT NULL,
	reason VARCHAR,
	missing JSON,
	missing_count INTEGER NOT NULL,
	opened_ns INTEGER NOT NULL,
	updated_ns INTEGER NOT NULL,
	ready_ns INTEGER,
	revision INTEGER NOT NULL,
	analysed_revision INTEGER,
	owner VARCHAR,
	fence INTEGER NOT NULL,
	lease_ns INTEGER NOT NULL,
	tries INTEGER NOT NULL,
	pinned BOOLEAN NOT NULL,
	compacted_ns INTEGER,
	expired_ns INTEGER,
	CONSTRAINT pk_windows PRIMARY KEY (id),
	CONSTRAINT fk_windows_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_windows_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_windows_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT uq_windows_attempt_id UNIQUE (attempt_id, kind, number)
);
CREATE INDEX ix_windows_attempt_id ON windows (attempt_id);
CREATE INDEX ix_windows_job_id ON windows (job_id);
CREATE INDEX ix_windows_tenant ON windows (tenant_id, updated_ns);
CREATE INDEX ix_windows_updated_ns ON windows (updated_ns);
CREATE INDEX ix_windows_work ON windows (state, lease_ns);
CREATE TABLE clock_samples (
	stream_id VARCHAR NOT NULL,
	at_ns INTEGER NOT NULL,
	offset_ns INTEGER NOT NULL,
	error_ns INTEGER NOT NULL,
	CONSTRAINT pk_clock_samples PRIMARY KEY (stream_id, at_ns),
	CONSTRAINT fk_clock_samples_stream_id FOREIGN KEY(stream_id) REFERENCES streams (id)
);
CREATE INDEX ix_clock_samples_at_ns ON clock_samples (at_ns);
CREATE TABLE coverage (
	stream_id VARCHAR NOT NULL,
	epoch INTEGER NOT NULL,
	ranges JSON NOT NULL,
	pending_steps JSON NOT NULL,
	awaited JSON NOT NULL,
	end_seq INTEGER,
	CONSTRAINT pk_coverage PRIMARY KEY (stream_id, epoch),
	CONSTRAINT fk_coverage_stream_id FOREIGN KEY(stream_id) REFERENCES streams (id)
);
CREATE TABLE event_files (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	attempt_id VARCHAR NOT NULL,
	window_id VARCHAR,
	kind VARCHAR NOT NULL,
	path VARCHAR NOT NULL,
	rows INTEGER NOT NULL,
	bytes INTEGER NOT NULL,
	first_step INTEGER NOT NULL,
	last_step INTEGER NOT NULL,
	created_ns INTEGER NOT NULL,
	doomed_ns INTEGER,
	CONSTRAINT pk_event_files PRIMARY KEY (id),
	CONSTRAINT fk_event_files_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_event_files_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_event_files_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT fk_event_files_window_id FOREIGN KEY(window_id) REFERENCES windows (id),
	CONSTRAINT uq_event_files_path UNIQUE (path)
);
CREATE INDEX ix_event_files_attempt_id ON event_files (attempt_id);
CREATE INDEX ix_event_files_created_ns ON event_files (created_ns);
CREATE INDEX ix_event_files_doomed_ns ON event_files (doomed_ns);
CREATE INDEX ix_event_files_job_id ON event_files (job_id);
CREATE INDEX ix_event_files_tenant_id ON event_files (tenant_id);
CREATE INDEX ix_event_files_window_id ON event_files (window_id);
CREATE TABLE file_drops (
	attempt_id VARCHAR NOT NULL,
	reason VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	files INTEGER NOT NULL,
	name VARCHAR NOT NULL,
	last_ns INTEGER NOT NULL,
	CONSTRAINT pk_file_drops PRIMARY KEY (attempt_id, reason),
	CONSTRAINT fk_file_drops_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_file_drops_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_file_drops_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_file_drops_job_id ON file_drops (job_id);
CREATE TABLE sent_files (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	attempt_id VARCHAR NOT NULL,
	window_id VARCHAR,
	"key" VARCHAR NOT NULL,
	state VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	format VARCHAR NOT NULL,
	rank INTEGER,
	world_size INTEGER,
	sha256 VARCHAR NOT NULL,
	bytes INTEGER NOT NULL,
	parts INTEGER NOT NULL,
	first_step INTEGER,
	last_step INTEGER,
	start_ns INTEGER,
	end_ns INTEGER,
	have JSON NOT NULL,
	created_ns INTEGER NOT NULL,
	CONSTRAINT pk_sent_files PRIMARY KEY (id),
	CONSTRAINT fk_sent_files_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_sent_files_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_sent_files_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT fk_sent_files_window_id FOREIGN KEY(window_id) REFERENCES windows (id),
	CONSTRAINT uq_sent_files_attempt_id UNIQUE (attempt_id, "key")
);
CREATE INDEX ix_sent_files_job_id ON sent_files (job_id);
CREATE INDEX ix_sent_files_state ON sent_files (state, created_ns);
CREATE INDEX ix_sent_files_window_id ON sent_files (window_id);
CREATE TABLE finding_events (
	id VARCHAR NOT NULL,
	finding_id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	at_ns INTEGER NOT NULL,
	step INTEGER NOT NULL,
	event VARCHAR NOT NULL,
	severity VARCHAR NOT NULL,
	excess_s FLOAT,
	CONSTRAINT pk_finding_events PRIMARY KEY (id),
	CONSTRAINT fk_finding_events_finding_id FOREIGN KEY(finding_id) REFERENCES findings (id),
	CONSTRAINT fk_finding_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_finding_events_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_finding_events_at_ns ON finding_events (at_ns);
CREATE INDEX ix_finding_events_finding_id ON finding_events (finding_id);
CREATE INDEX ix_finding_events_job_id ON finding_events (job_id);
CREATE TABLE results (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	attempt_id VARCHAR NOT NULL,
	window_id VARCHAR NOT NULL,
	code_version VARCHAR NOT NULL,
	revision INTEGER NOT NULL,
	fence INTEGER NOT NULL,
	created_ns INTEGER NOT NULL,
	analysis_s FLOAT NOT NULL,
	verdict VARCHAR NOT NULL,
	cause VARCHAR,
	slowdown FLOAT,
	waste_ratio FLOAT,
	recorded_s FLOAT,
	ideal_s FLOAT,
	aligned BOOLEAN,
	coverage_ratio FLOAT NOT NULL,
	report BLOB NOT NULL,
	workers_path VARCHAR,
	CONSTRAINT pk_results PRIMARY KEY (id),
	CONSTRAINT fk_results_attempt_id FOREIGN KEY(attempt_id) REFERENCES attempts (id),
	CONSTRAINT fk_results_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_results_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT fk_results_window_id FOREIGN KEY(window_id) REFERENCES windows (id),
	CONSTRAINT uq_results_window_id UNIQUE (window_id, code_version)
);
CREATE INDEX ix_results_attempt_id ON results (attempt_id);
CREATE INDEX ix_results_created_ns ON results (created_ns);
CREATE INDEX ix_results_job_id ON results (job_id);
CREATE INDEX ix_results_loss ON results (window_id, created_ns, cause, recorded_s, waste_ratio);
CREATE INDEX ix_results_tenant ON results (tenant_id, created_ns);
CREATE TABLE notices (
	id VARCHAR NOT NULL,
	tenant_id VARCHAR NOT NULL,
	job_id VARCHAR NOT NULL,
	channel VARCHAR NOT NULL,
	"key" VARCHAR NOT NULL,
	told_severity VARCHAR,
	opened_ns INTEGER NOT NULL,
	told_ns INTEGER NOT NULL,
	messages INTEGER NOT NULL,
	state VARCHAR NOT NULL,
	given_up VARCHAR,
	error VARCHAR,
	created_ns INTEGER NOT NULL,
	finished_ns INTEGER,
	owner VARCHAR,
	fence INTEGER NOT NULL,
	lease_ns INTEGER NOT NULL,
	tries INTEGER NOT NULL,
	CONSTRAINT pk_notices PRIMARY KEY (id),
	CONSTRAINT fk_notices_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
	CONSTRAINT fk_notices_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
	CONSTRAINT uq_notices_channel UNIQUE (channel, job_id, "key")
);
CREATE INDEX ix_notices_job_id ON notices (job_id);
CREATE INDEX ix_notices_state ON notices (state);
CREATE INDEX ix_notices_tenant_id ON notices (tenant_id);
