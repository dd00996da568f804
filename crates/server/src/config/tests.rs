use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<ServerConfig> {
    ServerConfig::parse(text, "oubliette.toml", &|name| match name {
        "KEY" => Some("secret".into()),
        "OUBLIETTE_CLUSTER_KEY" => Some("a key of 16 chars".into()),
        _ => None,
    })
}

#[test]
fn the_first_run_file_is_the_defaults() {
    let (template, empty) = (parse(TEMPLATE).unwrap(), parse("").unwrap());
    assert_eq!(format!("{template:?}"), format!("{empty:?}"));
    assert_eq!(empty.listen.to_string(), DEFAULT_LISTEN);
    assert_eq!(empty.relay.reconnect_grace, Duration::from_millis(500));
}

#[test]
fn every_commented_key_of_the_first_run_file_is_a_real_one() {
    let text: String = TEMPLATE
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest) if rest.contains(" = ") && !rest.ends_with('.') || rest.starts_with('[') => rest,
            _ => line,
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let config = parse(&text).unwrap();
    assert_eq!(config.providers.len(), 3);
    assert_eq!(config.upstreams.len(), 1);
    assert!(config.tls.is_some());
    assert!(config.cluster.is_some());
}

#[test]
fn the_environment_goes_before_the_files_store() {
    let text = "[store]\nurl = \"postgres://file@h/d\"";
    let of_file = parse(text).unwrap().store_url.unwrap();
    assert_eq!(of_file.to_string(), "postgres://file@h:5432/d");
    let parsed = ServerConfig::parse(text, "oubliette.toml", &|name| {
        (name == "OUBLIETTE_STORE_URL").then(|| "postgres://env:pw@h:1/d".into())
    });
    assert_eq!(
        parsed.unwrap().store_url.unwrap().to_string(),
        "postgres://env@h:1/d"
    );
    assert!(parse("").unwrap().store_url.is_none());
}

#[test]
fn the_password_of_the_stores_address_is_never_shown() {
    for text in [
        "[store]\nurl = \"postgres://me:hunter2@h/d",
        "[store]\nurl = \"postgres://me:hunter2@h/d\" x",
        "[store]\nurl = [\"postgres://me:hunter2@h/d\"]",
        "[store]\nul = \"postgres://me:hunter2@h/d\"",
        "[store]\nurl = \"mysql://me:hunter2@h/d\"",
        "[store]\nurl = \"postgres://me:hunter2@h:port/d\"",
        "[store]\nurl = \"postgres://me@h/d?hunter2=1\"",
    ] {
        let error = parse(text).unwrap_err();
        assert!(
            !format!("{error:?} {}", error.for_log()).contains("hunter2"),
            "{text}: {error}"
        );
    }
    let config = parse("[store]\nurl = \"postgres://me:hunter2@h/d\"").unwrap();
    assert!(!format!("{config:?}").contains("hunter2"));
    let error = parse("[trust]\nenv = [\"OUBLIETTE_STORE_URL\"]").unwrap_err();
    assert!(error.message.contains("never given"), "{error}");
}

#[test]
fn a_refusal_names_file_field_and_reason() {
    for (text, field) in [
        ("[server]\nlisen = \"x\"", "lisen"),
        ("[server]\nlisten = \"x\"", "server.listen"),
        ("[server]\ntls_cert = \"/a\"", "tls_key"),
        ("[server]\nrate_limit = { per_second = 0 }", "rate_limit"),
        ("[trust]\nread_only = [\"a\"]", "trust.read_only"),
        ("[trust]\nenv = [\"A B\"]", "trust.env"),
        ("[trust]\nhost_tools = [\"A\"]", "host_tools"),
        ("[relay]\ncaller_timeout = \"1 year\"", "caller_timeout"),
        ("[sandbox]\nminimum = \"some\"", "sandbox.minimum"),
        ("[sandbox]\ncpus = 0", "sandbox.cpus"),
        ("[sandbox]\ntotal_memory_mb = 10", "sandbox.total_memory_mb"),
        ("[sandbox]\ntotal_pids = 0", "sandbox.total_pids"),
        ("[sandbox]\ndriver = \"podman\"", "sandbox.driver"),
        (
            "[sandbox]\ndriver = \"kubernetes\"",
            "sandbox.kubernetes.stage_listen",
        ),
        ("[limits]\nsession_buffer_mb = 63", "limits.session_buffer_mb"),
        ("[limits]\nserver_buffer_mb = 32", "limits.server_buffer_mb"),
        ("[limits]\nsession_log_mb = 0", "limits.session_log_mb"),
        ("[providers.a]\n", "base_url"),
        (
            "[providers.a]\nbase_url = \"http://h\"\n[upstreams.a]\nbase_url = \"http://h\"",
            "upstreams.a",
        ),
        ("[upstreams.a]\n", "base_url"),
        (
            "[upstreams.a]\nbase_url = \"http://h\"\nauth = \"digest\"",
            "upstreams.a.auth",
        ),
        (
            "[upstreams.a]\nbase_url = \"http://h\"\nallow = [{ methods = [\"GET\"], paths = [\"a*b\"] }]",
            "upstreams.a.allow[0]",
        ),
        (
            "[upstreams.a]\nbase_url = \"http://h\"\nallow = [{ paths = [\"a\"] }]",
            "methods",
        ),
        ("[debugger]\nkeep = \"5s\"", "debugger.keep"),
        ("[retention]\nsessions = \"10ms\"", "retention.sessions"),
        ("[retention]\nlogs = \"1d\"", "logs"),
        (
            "[retention]\ndebugger = \"1d\"\n[debugger]\nkeep = \"1d\"",
            "retention.debugger",
        ),
        ("[prices.gpt]\ninput = 1\noutput = 1", "prices."),
        ("[prices.\"a/b\"]\ninput = -1\noutput = 1", "input"),
        ("[prices.\"a/b\"]\ninput = nan\noutput = 1", "input"),
        ("[budget]\ncost_usd_per_day = -0.5", "budget.cost_usd_per_day"),
        ("[budget]\ntokens_per_day = -5", "tokens_per_day"),
        (
            "[[webhook]]\nurl = \"ftp://h\"\nevents = [\"error\"]\nsecret_env = \"KEY\"",
            "url",
        ),
        (
            "[[webhook]]\nurl = \"http://h\"\nevents = []\nsecret_env = \"KEY\"",
            "events",
        ),
        (
            "[[webhook]]\nurl = \"http://h\"\nevents = [\"eror\"]\nsecret_env = \"KEY\"",
            "eror",
        ),
        (
            "[[webhook]]\nurl = \"http://h\"\nevents = [\"error\"]",
            "secret_env",
        ),
        ("[log]\nformat = \"xml\"", "log.format"),
        ("x", "oubliette.toml"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.message.contains("oubliette.toml"), "{text}: {error}");
        assert!(error.message.contains(field), "{text}: {error}");
    }
}

#[test]
fn retention_is_for_ever_unless_it_is_said() {
    assert_eq!(parse("").unwrap().retention, RetentionPeriods::default());
    let given = parse("[retention]\nsessions = \"90d\"\n[debugger]\nkeep = \"1h\"").unwrap();
    assert_eq!(given.retention.sessions, Some(Duration::from_secs(90 * 86_400)));
    assert_eq!(given.retention.debugger, Some(Duration::from_secs(3_600)));
    assert_eq!((given.retention.audit, given.retention.usage), (None, None));
}

#[test]
fn a_providers_key_comes_from_the_environment_and_is_not_printed() {
    let config = parse("[providers.x]\nbase_url = \"http://h\"\napi_key_env = \"KEY\"").unwrap();
    assert!(config.providers[0].api_key.is_some());
    assert!(!format!("{config:?}").contains("secret"));
}

#[test]
fn a_services_credential_comes_from_the_environment_and_is_not_printed() {
    let config = parse("[upstreams.x]\nbase_url = \"http://h\"\napi_key_env = \"KEY\"").unwrap();
    assert!(config.upstreams[0].api_key.is_some() && !config.upstreams[0].lacks_key());
    assert!(!format!("{config:?}").contains("secret"));
    let config = parse("[upstreams.x]\nbase_url = \"http://h\"\napi_key_env = \"OTHER\"").unwrap();
    assert!(config.upstreams[0].lacks_key());
}

#[test]
fn listen_addresses_are_parsed_or_refused() {
    assert_eq!(parse_listen("localhost:1").unwrap().to_string(), "127.0.0.1:1");
    assert_eq!(parse_listen(":1").unwrap().to_string(), "127.0.0.1:1");
    assert_eq!(parse_listen("[::1]:1").unwrap().to_string(), "[::1]:1");
    for bad in ["", "8080", "example.com:80", "127.0.0.1:99999"] {
        assert!(parse_listen(bad).is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
        let _ = parse_listen(&text);
    }
}

#[test]
fn a_cluster_is_configured_whole_or_refused_by_the_field() {
    let whole = [
        ("namespace", "\"agents\""),
        ("volume_claim", "\"oubliette\""),
        ("volume_path", "\"/srv/oubliette\""),
        ("stage_listen", "\"0.0.0.0:7443\""),
        ("stage_address", "\"10.0.0.5:7443\""),
    ];
    let read = |fields: &[(&str, &str)]| {
        let fields: String = fields
            .iter()
            .map(|(name, value)| format!("{name} = {value}\n"))
            .collect();
        parse(&format!(
            "[sandbox]\ndriver = \"kubernetes\"\n[sandbox.kubernetes]\n{fields}"
        ))
    };
    let config = read(&whole).unwrap().sandbox;
    assert!(config.driver == "kubernetes" && config.docker.is_none() && config.has_containers());
    let cluster = config.kubernetes.unwrap();
    assert_eq!((cluster.cpu_request, cluster.memory_request_mb), (0.1, 128));
    for (number, (name, _)) in whole.iter().enumerate() {
        let mut fields = whole.to_vec();
        fields.remove(number);
        let message = read(&fields).unwrap_err().message;
        assert!(
            message.contains(&format!("sandbox.kubernetes.{name}")),
            "{message}"
        );
    }
    for (name, value) in [
        ("namespace", "\"Not a name\""),
        ("volume_path", "\"relative\""),
        ("kubeconfig", "\"config\""),
        ("stage_listen", "\"7443\""),
        ("stage_listen", "\"0.0.0.0:0\""),
        ("stage_address", "\"0.0.0.0:7443\""),
        ("stage_address", "\"http://10.0.0.5\""),
        ("runtime_class", "\"--x\""),
        ("network_policy", "\"off\""),
        ("cpu_request", "0"),
        ("memory_request", "0"),
        ("image", "\"--privileged x\""),
    ] {
        let mut fields: Vec<_> = whole
            .iter()
            .copied()
            .filter(|(other, _)| *other != name)
            .collect();
        fields.push((name, value));
        let message = read(&fields).unwrap_err().message;
        assert!(
            message.contains(&format!("sandbox.kubernetes.{name}")),
            "{message}"
        );
    }
    let message = read(&[("pods", "1")]).unwrap_err().message;
    assert!(message.contains("pods"), "unknown keys are refused: {message}");
}
