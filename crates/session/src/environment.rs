//! The environment variables of an agent: where its model and its tools are, and what its project,
//! workspace and definition set.

use std::net::{Ipv4Addr, TcpListener};

use indexmap::IndexMap;
use oubliette_egress::{AuthStyle, ModelProvider};
use oubliette_programs::ProgramLaunch;
use oubliette_protocol::{
    Error, Result,
    agent::{AgentDefinition, AgentRuntime, NetworkAccess},
    relay::{HANDOFF_SOCKET_ENV, HANDOFF_SOCKET_PATH, KEY_ENV, SOCKET_ENV, SOCKET_PATH},
};
use oubliette_sandbox::IsolationLevel;
use oubliette_tools::Secrets;
use serde_json::json;

use crate::{agent_plan::AgentPlan, ports::SessionDeps};

/// The loopback ports on which the model forwarder, the proxy and, for agents that are given them over HTTP, the tools are
/// reached inside the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoopbackPorts {
    pub(crate) model: u16,
    pub(crate) proxy: u16,
    pub(crate) tools: u16,
}

impl LoopbackPorts {
    /// Chooses the ports. A sandbox with a network namespace of its own has the fixed ports 19999, 19998 and 19997.
    /// One on the host's network shares all ports with the rest of the machine, and gets some that are free now.
    pub(crate) fn choose(network: NetworkAccess, level: IsolationLevel) -> Result<Self> {
        if level == IsolationLevel::Namespaces && network != NetworkAccess::Host {
            return Ok(Self {
                model: 19999,
                proxy: 19998,
                tools: 19997,
            });
        }
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::internal);
        let port = |held: &TcpListener| held.local_addr().map(|at| at.port()).map_err(Error::internal);
        // The listeners stay open until all ports are known, so that they differ.
        let (model, proxy, tools) = (free()?, free()?, free()?);
        Ok(Self {
            model: port(&model)?,
            proxy: port(&proxy)?,
            tools: port(&tools)?,
        })
    }
}

/// The value of API key variables, because SDKs refuse to start without one. The model gateway, outside the
/// sandbox, puts the real key into each request.
const PLACEHOLDER_KEY: &str = "kept-outside-the-sandbox";
/// The longest configuration passed in a variable. The kernel's limit for one is 128 KiB (`MAX_ARG_STRLEN`).
const MAX_VARIABLE_BYTES: usize = 100 * 1024;
/// The file in the agent's home directory that holds a longer configuration.
pub(crate) const CONFIG_FILE: &str = ".oubliette-agent.json";

/// The environment variables of the agent and of its `oubliette-client`.
pub(crate) struct AgentEnvironment {
    pub(crate) agent: Vec<(String, String)>,
    pub(crate) client: Vec<(String, String)>,
    /// The configuration of the built-in agent when it is too long for a variable; to be written to
    /// [`CONFIG_FILE`].
    pub(crate) config_file: Option<String>,
}

/// Puts the variables together. Later ones replace earlier ones, in the order model providers, proxy, project,
/// workspace, agent, runtime, and last those that nobody may change.
pub(crate) fn agent_environment(
    deps: &SessionDeps,
    plan: &AgentPlan,
    launch: Option<&ProgramLaunch>,
    ports: LoopbackPorts,
    minted: Option<String>,
) -> Result<AgentEnvironment> {
    let mut env: IndexMap<String, String> = IndexMap::new();
    env.extend(launch.into_iter().flat_map(|launch| launch.env.clone()));
    for provider in deps.gateway.providers() {
        set_provider_variables(&provider, ports, &mut env);
    }
    if plan.network == NetworkAccess::Proxy {
        let proxy = format!("http://127.0.0.1:{}", ports.proxy);
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
            env.insert(name.into(), proxy.clone());
        }
        for name in ["NO_PROXY", "no_proxy"] {
            env.insert(name.into(), "127.0.0.1,localhost,::1".into());
        }
        // Node.js heeds the variables above only with this one.
        env.insert("NODE_USE_ENV_PROXY".into(), "1".into());
    }
    let definition = &plan.entry.definition;
    let given = |set: &IndexMap<String, String>| {
        set.iter()
            .map(|(n, v)| (n.clone(), v.clone()))
            .collect::<Vec<_>>()
    };
    env.extend(given(&plan.project.env));
    env.extend(given(&plan.workspace.env));
    // Collected by `expand` and dropped: values read from the server's environment are meant for the agent.
    let secrets = Secrets::new();
    if let Some((provider, model)) = definition
        .model
        .as_deref()
        .and_then(|model| model.split_once('/'))
        && let Some(name) = model_variable(deps, provider)
    {
        env.insert(name.into(), model.to_owned());
    }
    let mut expand = |set: &IndexMap<String, String>| -> Result<()> {
        for (name, value) in set {
            let value = expand_model_urls(value, ports);
            env.insert(name.clone(), deps.trust.expand(&value, &*deps.env, &secrets)?);
        }
        Ok(())
    };
    expand(&definition.env)?;
    let mut config_file = None;
    match &definition.runtime {
        AgentRuntime::Acp { env: more, .. } => expand(more)?,
        AgentRuntime::Builtin {} => {
            let config = json!({
                "prompt": definition.prompt,
                "model": definition.model,
                "script": plan.script,
                "base_url": format!("http://127.0.0.1:{}", ports.model),
            })
            .to_string();
            let value = match config.len() > MAX_VARIABLE_BYTES {
                false => config,
                true => {
                    config_file = Some(config);
                    format!("@{}/{CONFIG_FILE}", oubliette_sandbox::spec::HOME)
                }
            };
            env.insert("OUBLIETTE_AGENT_CONFIG".into(), value);
        }
    }
    add_upstreams(deps, &plan.upstreams, ports, &mut env);
    env.insert(SOCKET_ENV.into(), SOCKET_PATH.into());
    // No sandbox that passes descriptors outlives the server, so the client may hand its streams off there.
    match deps.sandbox.passes_descriptors() {
        true => drop(env.insert(HANDOFF_SOCKET_ENV.into(), HANDOFF_SOCKET_PATH.into())),
        false => drop(env.shift_remove(HANDOFF_SOCKET_ENV)),
    }
    if let Some(key) = minted {
        // A key that the project or the definition sets is kept.
        env.entry(KEY_ENV.into()).or_insert(key);
    }
    let client = [SOCKET_ENV, HANDOFF_SOCKET_ENV, KEY_ENV]
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), env.get(*name)?.clone())));
    let client = client.collect();
    Ok(AgentEnvironment {
        agent: env.into_iter().collect(),
        client,
        config_file,
    })
}

/// Maximum number of entries of git's configuration that other variables may set.
const MAX_GIT_ENTRIES: usize = 1000;

/// Adds where services are, and has git ask them instead of their hosts, in addition to what else its configuration is
/// given by variables (`GIT_CONFIG_COUNT`).
fn add_upstreams(
    deps: &SessionDeps,
    names: &[String],
    ports: LoopbackPorts,
    env: &mut IndexMap<String, String>,
) {
    let count = env.get("GIT_CONFIG_COUNT").and_then(|text| text.parse().ok());
    let given = count.unwrap_or(0).min(MAX_GIT_ENTRIES);
    let mut next = given;
    for service in names.iter().filter_map(|name| deps.services.service(name)) {
        let name = &service.name;
        let here = format!("http://127.0.0.1:{}/{name}/", ports.model);
        let variable = name.to_ascii_uppercase().replace(['-', '.'], "_");
        env.insert(format!("OUBLIETTE_UPSTREAM_{variable}"), here.clone());
        for url in service.git_urls() {
            env.insert(format!("GIT_CONFIG_KEY_{next}"), format!("url.{here}.insteadOf"));
            env.insert(format!("GIT_CONFIG_VALUE_{next}"), url);
            next += 1;
        }
    }
    if next > given {
        env.insert("GIT_CONFIG_COUNT".into(), next.to_string());
    }
}

/// What stands for the model forwarder's address in a definition: `${model_url:PROVIDER}`.
const MODEL_URL: &str = "${model_url:";

/// Replaces every `${model_url:PROVIDER}` by the address at which the provider is reached inside the sandbox.
pub(crate) fn expand_model_urls(text: &str, ports: LoopbackPorts) -> String {
    let mut pieces = text.split(MODEL_URL);
    let mut expanded = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        match split_provider(piece) {
            Some((provider, rest)) => {
                expanded.push_str(&model_url(provider, ports));
                expanded.push_str(rest);
            }
            None => expanded.extend([MODEL_URL, piece]),
        }
    }
    expanded
}

/// The provider's name at the start of what follows `${model_url:`, and what follows its brace.
fn split_provider(piece: &str) -> Option<(&str, &str)> {
    let is_name = |name: &str| {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        !name.is_empty() && name.bytes().all(allowed)
    };
    piece.split_once('}').filter(|(name, _)| is_name(name))
}

/// The address of a provider inside the sandbox.
fn model_url(provider: &str, ports: LoopbackPorts) -> String {
    format!("http://127.0.0.1:{}/{provider}", ports.model)
}

/// Checks that every model provider an agent needs is configured and has its key, so that its start is refused at once
/// instead of failing at its first model request.
pub(crate) fn check_providers(deps: &SessionDeps, plan: &AgentPlan) -> Result<()> {
    needed_providers(&plan.entry.definition, plan.network)
        .into_iter()
        .try_for_each(|name| check_provider(deps, name))
}

/// The model providers without which an agent's start is refused: those whose `${model_url:PROVIDER}` it uses, and its
/// model's, unless its network may be another way to it.
pub fn needed_providers(definition: &AgentDefinition, network: NetworkAccess) -> Vec<&str> {
    let mut needed = Vec::new();
    // With a network of its own an agent may reach its model another way.
    let only_way = match &definition.runtime {
        AgentRuntime::Builtin {} => true,
        AgentRuntime::Acp {
            env, command, args, ..
        } => {
            let texts = env
                .values()
                .chain(definition.env.values())
                .chain(command)
                .chain(args);
            needed.extend(texts.flat_map(|text| providers_in(text)));
            network == NetworkAccess::None
        }
    };
    let of_model = definition
        .model
        .as_deref()
        .and_then(|model| model.split_once('/'));
    needed.extend(of_model.filter(|_| only_way).map(|(provider, _)| provider));
    needed
}

/// The providers whose `${model_url:PROVIDER}` a text contains.
fn providers_in(text: &str) -> impl Iterator<Item = &str> {
    let pieces = text.split(MODEL_URL).skip(1);
    pieces.filter_map(|piece| Some(split_provider(piece)?.0))
}

fn check_provider(deps: &SessionDeps, name: &str) -> Result<()> {
    let providers = deps.gateway.providers();
    let Some(provider) = providers.iter().find(|known| known.name == name) else {
        let (url, key) = match name {
            "anthropic" => ("https://api.anthropic.com", "ANTHROPIC_API_KEY"),
            "openai" => ("https://api.openai.com", "OPENAI_API_KEY"),
            "gemini" => ("https://generativelanguage.googleapis.com", "GEMINI_API_KEY"),
            "mistral" => ("https://api.mistral.ai", "MISTRAL_API_KEY"),
            "openrouter" => ("https://openrouter.ai/api", "OPENROUTER_API_KEY"),
            _ => ("https://…", "…_API_KEY"),
        };
        let bare = name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        let name = match bare && name.len() <= 100 {
            true => name.to_owned(),
            false => oubliette_protocol::id::quoted(name),
        };
        return Err(Error::unavailable(format!(
            "the model provider {name} is not configured; write into oubliette.toml, and send the server SIGHUP or restart it:\n\
             [providers.{name}]\nbase_url = \"{url}\"\napi_key_env = \"{key}\""
        )));
    };
    match (&provider.api_key, &provider.api_key_env) {
        (None, Some(variable)) => Err(Error::unavailable(format!(
            "the model provider {name} has no key: [providers.{name}] api_key_env in oubliette.toml names {variable}, which \
             is not set in the server's environment; set it there and restart the server"
        ))),
        _ => Ok(()),
    }
}

/// The variable in which common agents expect the name of a provider's model.
fn model_variable(deps: &SessionDeps, provider: &str) -> Option<&'static str> {
    let providers = deps.gateway.providers();
    let provider = providers.iter().find(|known| known.name == provider)?;
    Some(match provider.style {
        AuthStyle::Anthropic => "ANTHROPIC_MODEL",
        AuthStyle::Gemini => "GEMINI_MODEL",
        AuthStyle::Bearer => "OPENAI_MODEL",
    })
}

/// Sets the variables from which a provider's SDKs read their base URL and key to the model forwarder.
fn set_provider_variables(
    provider: &ModelProvider,
    ports: LoopbackPorts,
    env: &mut IndexMap<String, String>,
) {
    let base = model_url(&provider.name, ports);
    let named = |names: &[&str]| names.contains(&provider.name.as_str());
    let (urls, keys): (&[(&str, String)], &[&str]) = match provider.style {
        AuthStyle::Anthropic => (&[("ANTHROPIC_BASE_URL", base)], &["ANTHROPIC_API_KEY"]),
        AuthStyle::Gemini => (
            &[
                ("GOOGLE_GEMINI_BASE_URL", base.clone()),
                ("GEMINI_BASE_URL", base),
            ],
            &["GEMINI_API_KEY", "GOOGLE_API_KEY"],
        ),
        AuthStyle::Bearer if named(&["openai"]) || !env.contains_key("OPENAI_BASE_URL") => (
            &[
                ("OPENAI_BASE_URL", format!("{base}/v1")),
                ("OPENAI_API_BASE", format!("{base}/v1")),
            ],
            &["OPENAI_API_KEY"],
        ),
        AuthStyle::Bearer => return,
    };
    env.extend(urls.iter().map(|(name, url)| ((*name).to_owned(), url.clone())));
    env.extend(
        keys.iter()
            .map(|name| ((*name).to_owned(), PLACEHOLDER_KEY.to_owned())),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_urls_are_replaced_and_named() {
        let ports = LoopbackPorts {
            model: 19999,
            proxy: 19998,
            tools: 19997,
        };
        let text = r#"{"a":"${model_url:openai}/v1","b":"${model_url:x}","c":"${other} ${model_url:"}"#;
        assert_eq!(
            expand_model_urls(text, ports),
            r#"{"a":"http://127.0.0.1:19999/openai/v1","b":"http://127.0.0.1:19999/x","c":"${other} ${model_url:"}"#
        );
        assert_eq!(providers_in(text).collect::<Vec<_>>(), ["openai", "x"]);
    }

    #[test]
    fn sandboxes_that_share_a_network_do_not_share_ports() {
        let alone = LoopbackPorts::choose(NetworkAccess::Proxy, IsolationLevel::Namespaces).unwrap();
        assert_eq!((alone.model, alone.proxy), (19999, 19998));
        for (network, level) in [
            (NetworkAccess::Host, IsolationLevel::Namespaces),
            (NetworkAccess::None, IsolationLevel::Landlock),
        ] {
            let ports = LoopbackPorts::choose(network, level).unwrap();
            // Bound by this test, or by another process that was quicker.
            let _taken =
                [ports.model, ports.proxy].map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)));
            let others = LoopbackPorts::choose(network, level).unwrap();
            assert!(ports != others && ports.model != ports.proxy && others.model != ports.proxy);
        }
    }
}
