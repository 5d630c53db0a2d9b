CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.attempts (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    number bigint NOT NULL,
    dp bigint NOT NULL,
    pp bigint NOT NULL,
    tp bigint NOT NULL,
    cp bigint NOT NULL,
    ep bigint NOT NULL,
    vpp bigint NOT NULL,
    mode character varying NOT NULL,
    time_base character varying NOT NULL,
    window_steps bigint NOT NULL,
    notes json NOT NULL,
    created_ns bigint NOT NULL,
    last_data_ns bigint NOT NULL,
    ended_ns bigint,
    end_reason character varying,
    revision bigint NOT NULL,
    ready_step bigint,
    live_step bigint,
    live_owner character varying,
    live_fence bigint NOT NULL,
    live_lease_ns bigint NOT NULL,
    live_analysed_ns bigint,
    live_verdict character varying,
    live_slowdown double precision,
    live_waste_ratio double precision,
    live_recorded_s double precision,
    live_ideal_s double precision,
    live_aligned boolean,
    live_coverage_ratio double precision,
    live_report bytea,
    live_workers bytea
);
CREATE TABLE public.clock_samples (
    stream_id character varying NOT NULL,
    at_ns bigint NOT NULL,
    offset_ns bigint NOT NULL,
    error_ns bigint NOT NULL
);
CREATE TABLE public.coverage (
    stream_id character varying NOT NULL,
    epoch bigint NOT NULL,
    ranges json NOT NULL,
    pending_steps json NOT NULL,
    awaited json NOT NULL,
    end_seq bigint
);
CREATE TABLE public.event_files (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    attempt_id character varying NOT NULL,
    window_id character varying,
    kind character varying NOT NULL,
    path character varying NOT NULL,
    rows bigint NOT NULL,
    bytes bigint NOT NULL,
    first_step bigint NOT NULL,
    last_step bigint NOT NULL,
    created_ns bigint NOT NULL,
    doomed_ns bigint
);
CREATE TABLE public.file_drops (
    attempt_id character varying NOT NULL,
    reason character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    files bigint NOT NULL,
    name character varying NOT NULL,
    last_ns bigint NOT NULL
);
CREATE TABLE public.finding_events (
    id character varying NOT NULL,
    finding_id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    at_ns bigint NOT NULL,
    step bigint NOT NULL,
    event character varying NOT NULL,
    severity character varying NOT NULL,
    excess_s double precision
);
CREATE TABLE public.findings (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    attempt_id character varying NOT NULL,
    key character varying NOT NULL,
    source character varying NOT NULL,
    state character varying NOT NULL,
    verdict character varying NOT NULL,
    cause character varying NOT NULL,
    scope character varying NOT NULL,
    severity character varying NOT NULL,
    rank bigint,
    dp bigint,
    stage bigint,
    host character varying,
    gpu_uuid character varying,
    excess_s double precision,
    excess_share double precision,
    onset_step bigint,
    opened_step bigint NOT NULL,
    opened_ns bigint NOT NULL,
    last_step bigint NOT NULL,
    last_ns bigint NOT NULL,
    cleared_step bigint,
    cleared_ns bigint,
    document json NOT NULL
);
CREATE TABLE public.imports (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    state character varying NOT NULL,
    options json NOT NULL,
    files json NOT NULL,
    progress double precision NOT NULL,
    phase character varying,
    error character varying,
    job_id character varying,
    window_id character varying,
    created_ns bigint NOT NULL,
    finished_ns bigint,
    owner character varying,
    fence bigint NOT NULL,
    lease_ns bigint NOT NULL,
    tries bigint NOT NULL
);
CREATE TABLE public.jobs (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    name character varying NOT NULL,
    created_ns bigint NOT NULL,
    last_data_ns bigint NOT NULL,
    pinned boolean NOT NULL
);
CREATE TABLE public.nodes (
    id character varying NOT NULL,
    role character varying NOT NULL,
    host character varying NOT NULL,
    started_ns bigint NOT NULL,
    seen_ns bigint NOT NULL,
    version character varying NOT NULL
);
CREATE TABLE public.notices (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    channel character varying NOT NULL,
    key character varying NOT NULL,
    told_severity character varying,
    opened_ns bigint NOT NULL,
    told_ns bigint NOT NULL,
    messages bigint NOT NULL,
    state character varying NOT NULL,
    given_up character varying,
    error character varying,
    created_ns bigint NOT NULL,
    finished_ns bigint,
    owner character varying,
    fence bigint NOT NULL,
    lease_ns bigint NOT NULL,
    tries bigint NOT NULL
);
CREATE TABLE public.results (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    attempt_id character varying NOT NULL,
    window_id character varying NOT NULL,
    code_version character varying NOT NULL,
    revision bigint NOT NULL,
    fence bigint NOT NULL,
    created_ns bigint NOT NULL,
    analysis_s double precision NOT NULL,
    verdict character varying NOT NULL,
    cause character varying,
    slowdown double precision,
    waste_ratio double precision,
    recorded_s double precision,
    ideal_s double precision,
    aligned boolean,
    coverage_ratio double precision NOT NULL,
    report bytea NOT NULL,
    workers_path character varying
);
CREATE TABLE public.sent_files (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    attempt_id character varying NOT NULL,
    window_id character varying,
    key character varying NOT NULL,
    state character varying NOT NULL,
    name character varying NOT NULL,
    format character varying NOT NULL,
    rank bigint,
    world_size bigint,
    sha256 character varying NOT NULL,
    bytes bigint NOT NULL,
    parts bigint NOT NULL,
    first_step bigint,
    last_step bigint,
    start_ns bigint,
    end_ns bigint,
    have json NOT NULL,
    created_ns bigint NOT NULL
);
CREATE TABLE public.steps (
    attempt_id character varying NOT NULL,
    step bigint NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    recorded_s double precision,
    simulated_s double precision,
    ideal_s double precision,
    slowdown double precision,
    skipped character varying,
    start_ns bigint,
    analysed_ns bigint NOT NULL
);
CREATE TABLE public.streams (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    attempt_id character varying NOT NULL,
    key character varying NOT NULL,
    host character varying NOT NULL,
    source character varying NOT NULL,
    ranks json NOT NULL,
    epoch bigint NOT NULL,
    steps_done bigint,
    ended boolean NOT NULL,
    end_reason character varying,
    events bigint NOT NULL,
    lost_events bigint NOT NULL,
    created_ns bigint NOT NULL,
    last_data_ns bigint NOT NULL,
    heartbeat_ns bigint,
    heartbeat json
);
CREATE TABLE public.tasks (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    key character varying NOT NULL,
    kind character varying NOT NULL,
    options json NOT NULL,
    state character varying NOT NULL,
    error character varying,
    path character varying,
    created_ns bigint NOT NULL,
    finished_ns bigint,
    owner character varying,
    fence bigint NOT NULL,
    lease_ns bigint NOT NULL,
    tries bigint NOT NULL
);
CREATE TABLE public.tenants (
    id character varying NOT NULL,
    name character varying NOT NULL,
    created_ns bigint NOT NULL
);
CREATE TABLE public.tokens (
    kid character varying NOT NULL,
    tenant_id character varying NOT NULL,
    name character varying NOT NULL,
    sha256 character varying NOT NULL,
    scopes character varying NOT NULL,
    created_ns bigint NOT NULL,
    expires_ns bigint,
    revoked_ns bigint,
    last_used_ns bigint
);
CREATE TABLE public.windows (
    id character varying NOT NULL,
    tenant_id character varying NOT NULL,
    job_id character varying NOT NULL,
    attempt_id character varying NOT NULL,
    kind character varying NOT NULL,
    number bigint NOT NULL,
    first_step bigint NOT NULL,
    last_step bigint NOT NULL,
    rows bigint NOT NULL,
    state character varying NOT NULL,
    reason character varying,
    missing json,
    missing_count bigint NOT NULL,
    opened_ns bigint NOT NULL,
    updated_ns bigint NOT NULL,
    ready_ns bigint,
    revision bigint NOT NULL,
    analysed_revision bigint,
    owner character varying,
    fence bigint NOT NULL,
    lease_ns bigint NOT NULL,
    tries bigint NOT NULL,
    pinned boolean NOT NULL,
    compacted_ns bigint,
    expired_ns bigint
);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT pk_attempts PRIMARY KEY (id);
ALTER TABLE ONLY public.clock_samples
    ADD CONSTRAINT pk_clock_samples PRIMARY KEY (stream_id, at_ns);
ALTER TABLE ONLY public.coverage
    ADD CONSTRAINT pk_coverage PRIMARY KEY (stream_id, epoch);
ALTER TABLE ONLY public.event_files
    ADD CONSTRAINT pk_event_files PRIMARY KEY (id);
ALTER TABLE ONLY public.file_drops
    ADD CONSTRAINT pk_file_drops PRIMARY KEY (attempt_id, reason);
ALTER TABLE ONLY public.finding_events
    ADD CONSTRAINT pk_finding_events PRIMARY KEY (id);
ALTER TABLE ONLY public.findings
    ADD CONSTRAINT pk_findings PRIMARY KEY (id);
ALTER TABLE ONLY public.imports
    ADD CONSTRAINT pk_imports PRIMARY KEY (id);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (id);
ALTER TABLE ONLY public.nodes
    ADD CONSTRAINT pk_nodes PRIMARY KEY (id);
ALTER TABLE ONLY public.notices
    ADD CONSTRAINT pk_notices PRIMARY KEY (id);
ALTER TABLE ONLY public.results
    ADD CONSTRAINT pk_results PRIMARY KEY (id);
ALTER TABLE ONLY public.sent_files
    ADD CONSTRAINT pk_sent_files PRIMARY KEY (id);
ALTER TABLE ONLY public.steps
    ADD CONSTRAINT pk_steps PRIMARY KEY (attempt_id, step);
ALTER TABLE ONLY public.streams
    ADD CONSTRAINT pk_streams PRIMARY KEY (id);
ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT pk_tasks PRIMARY KEY (id);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT pk_tenants PRIMARY KEY (id);
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT pk_tokens PRIMARY KEY (kid);
ALTER TABLE ONLY public.windows
    ADD CONSTRAINT pk_windows PRIMARY KEY (id);
ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT uq_attempts_job_id UNIQUE (job_id, number);
ALTER TABLE ONLY public.event_files
    ADD CONSTRAINT uq_event_files_path UNIQUE (path);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_tenant_id UNIQUE (tenant_id, name);
ALTER TABLE ONLY public.notices
    ADD CONSTRAINT uq_notices_channel UNIQUE (channel, job_id, key);
ALTER TABLE ONLY public.results
    ADD CONSTRAINT uq_results_window_id UNIQUE (window_id, code_version);
ALTER TABLE ONLY public.sent_files
    ADD CONSTRAINT uq_sent_files_attempt_id UNIQUE (attempt_id, key);
ALTER TABLE ONLY public.streams
    ADD CONSTRAINT uq_streams_tenant_id UNIQUE (tenant_id, key);
ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT uq_tasks_tenant_id UNIQUE (tenant_id, key);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT uq_tenants_name UNIQUE (name);
ALTER TABLE ONLY public.windows
    ADD CONSTRAINT uq_windows_attempt_id UNIQUE (attempt_id, kind, number);
CREATE INDEX ix_attempts_job_id ON public.attempts USING btree (job_id);
CREATE INDEX ix_attempts_last_data_ns ON public.attempts USING btree (last_data_ns);
CREATE INDEX ix_attempts_tenant_id ON public.attempts USING btree (tenant_id);
CREATE INDEX ix_clock_samples_at_ns ON public.clock_samples USING btree (at_ns);
CREATE INDEX ix_event_files_attempt_id ON public.event_files USING btree (attempt_id);
CREATE INDEX ix_event_files_created_ns ON public.event_files USING btree (created_ns);
CREATE INDEX ix_event_files_doomed_ns ON public.event_files USING btree (doomed_ns);
CREATE INDEX ix_event_files_job_id ON public.event_files USING btree (job_id);
CREATE INDEX ix_event_files_tenant_id ON public.event_files USING btree (tenant_id);
CREATE INDEX ix_event_files_window_id ON public.event_files USING btree (window_id);
CREATE INDEX ix_file_drops_job_id ON public.file_drops USING btree (job_id);
CREATE INDEX ix_finding_events_at_ns ON public.finding_events USING btree (at_ns);
CREATE INDEX ix_finding_events_finding_id ON public.finding_events USING btree (finding_id);
CREATE INDEX ix_finding_events_job_id ON public.finding_events USING btree (job_id);
CREATE INDEX ix_findings_gpu_uuid ON public.findings USING btree (gpu_uuid);
CREATE INDEX ix_findings_host ON public.findings USING btree (host);
CREATE INDEX ix_findings_job_id ON public.findings USING btree (job_id);
CREATE INDEX ix_findings_last_ns ON public.findings USING btree (last_ns);
CREATE INDEX ix_findings_life ON public.findings USING btree (attempt_id, state, key);
CREATE INDEX ix_findings_tenant_id ON public.findings USING btree (tenant_id);
CREATE INDEX ix_imports_created_ns ON public.imports USING btree (created_ns);
CREATE INDEX ix_imports_state ON public.imports USING btree (state);
CREATE INDEX ix_imports_tenant_id ON public.imports USING btree (tenant_id);
CREATE INDEX ix_jobs_last_data_ns ON public.jobs USING btree (last_data_ns);
CREATE INDEX ix_jobs_tenant_id ON public.jobs USING btree (tenant_id);
CREATE INDEX ix_notices_job_id ON public.notices USING btree (job_id);
CREATE INDEX ix_notices_state ON public.notices USING btree (state);
CREATE INDEX ix_notices_tenant_id ON public.notices USING btree (tenant_id);
CREATE INDEX ix_results_attempt_id ON public.results USING btree (attempt_id);
CREATE INDEX ix_results_created_ns ON public.results USING btree (created_ns);
CREATE INDEX ix_results_job_id ON public.results USING btree (job_id);
CREATE INDEX ix_results_loss ON public.results USING btree (window_id, created_ns, cause, recorded_s, waste_ratio);
CREATE INDEX ix_results_tenant ON public.results USING btree (tenant_id, created_ns);
CREATE INDEX ix_sent_files_job_id ON public.sent_files USING btree (job_id);
CREATE INDEX ix_sent_files_state ON public.sent_files USING btree (state, created_ns);
CREATE INDEX ix_sent_files_window_id ON public.sent_files USING btree (window_id);
CREATE INDEX ix_steps_job_id ON public.steps USING btree (job_id);
CREATE INDEX ix_streams_attempt_id ON public.streams USING btree (attempt_id);
CREATE INDEX ix_streams_host ON public.streams USING btree (host);
CREATE INDEX ix_streams_job_id ON public.streams USING btree (job_id);
CREATE INDEX ix_streams_tenant_id ON public.streams USING btree (tenant_id);
CREATE INDEX ix_tasks_state ON public.tasks USING btree (state);
CREATE INDEX ix_tasks_tenant_id ON public.tasks USING btree (tenant_id);
CREATE INDEX ix_tokens_tenant_id ON public.tokens USING btree (tenant_id);
CREATE INDEX ix_windows_attempt_id ON public.windows USING btree (attempt_id);
CREATE INDEX ix_windows_job_id ON public.windows USING btree (job_id);
CREATE INDEX ix_windows_tenant ON public.windows USING btree (tenant_id, updated_ns);
CREATE INDEX ix_windows_updated_ns ON public.windows USING btree (updated_ns);
CREATE INDEX ix_windows_work ON public.windows USING btree (state, lease_ns);
ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT fk_attempts_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT fk_attempts_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.clock_samples
    ADD CONSTRAINT fk_clock_samples_stream_id FOREIGN KEY (stream_id) REFERENCES public.streams(id);
ALTER TABLE ONLY public.coverage
    ADD CONSTRAINT fk_coverage_stream_id FOREIGN KEY (stream_id) REFERENCES public.streams(id);
ALTER TABLE ONLY public.event_files
    ADD CONSTRAINT fk_event_files_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.event_files
    ADD CONSTRAINT fk_event_files_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.event_files
    ADD CONSTRAINT fk_event_files_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.event_files
    ADD CONSTRAINT fk_event_files_window_id FOREIGN KEY (window_id) REFERENCES public.windows(id);
ALTER TABLE ONLY public.file_drops
    ADD CONSTRAINT fk_file_drops_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.file_drops
    ADD CONSTRAINT fk_file_drops_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.file_drops
    ADD CONSTRAINT fk_file_drops_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.finding_events
    ADD CONSTRAINT fk_finding_events_finding_id FOREIGN KEY (finding_id) REFERENCES public.findings(id);
ALTER TABLE ONLY public.finding_events
    ADD CONSTRAINT fk_finding_events_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.finding_events
    ADD CONSTRAINT fk_finding_events_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.findings
    ADD CONSTRAINT fk_findings_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.findings
    ADD CONSTRAINT fk_findings_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.findings
    ADD CONSTRAINT fk_findings_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.imports
    ADD CONSTRAINT fk_imports_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT fk_jobs_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.notices
    ADD CONSTRAINT fk_notices_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.notices
    ADD CONSTRAINT fk_notices_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.results
    ADD CONSTRAINT fk_results_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.results
    ADD CONSTRAINT fk_results_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.results
    ADD CONSTRAINT fk_results_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.results
    ADD CONSTRAINT fk_results_window_id FOREIGN KEY (window_id) REFERENCES public.windows(id);
ALTER TABLE ONLY public.sent_files
    ADD CONSTRAINT fk_sent_files_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.sent_files
    ADD CONSTRAINT fk_sent_files_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.sent_files
    ADD CONSTRAINT fk_sent_files_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.sent_files
    ADD CONSTRAINT fk_sent_files_window_id FOREIGN KEY (window_id) REFERENCES public.windows(id);
ALTER TABLE ONLY public.steps
    ADD CONSTRAINT fk_steps_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.steps
    ADD CONSTRAINT fk_steps_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.steps
    ADD CONSTRAINT fk_steps_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.streams
    ADD CONSTRAINT fk_streams_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.streams
    ADD CONSTRAINT fk_streams_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.streams
    ADD CONSTRAINT fk_streams_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT fk_tasks_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT fk_tokens_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
ALTER TABLE ONLY public.windows
    ADD CONSTRAINT fk_windows_attempt_id FOREIGN KEY (attempt_id) REFERENCES public.attempts(id);
ALTER TABLE ONLY public.windows
    ADD CONSTRAINT fk_windows_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.windows
    ADD CONSTRAINT fk_windows_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id);
