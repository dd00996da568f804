//! The environment variables of an agent: where its model and its tools are, and what its project,
//! workspace and definition set.

use std::net::{Ipv4Addr, TcpListener};

use indexmap::IndexMap;
use oubliette_egress::{AuthStyle, ModelProvider};
use oubliette_protocol::{
    Error, Result,
    agent::{AgentRuntime, NetworkAccess},
    relay::{HANDOFF_SOCKET_ENV, HANDOFF_SOCKET_PATH, KEY_ENV, SOCKET_ENV, SOCKET_PATH},
};
use oubliette_sandbox::IsolationLevel;
use oubliette_tools::Secrets;
use serde_json::json;

use crate::{agent_plan::AgentPlan, ports::SessionDeps};

/// The loopback ports on which the model forwarder and the proxy listen inside the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoopbackPorts {
    pub(crate) model: u16,
    pub(crate) proxy: u16,
}

impl LoopbackPorts {
    /// Chooses the ports. A sandbox with a network namespace of its own has the fixed ports 19999 and 19998.
    /// One on the host's network shares all ports with the rest of the machine, and gets two that are free now.
    pub(crate) fn choose(network: NetworkAccess, level: IsolationLevel) -> Result<Self> {
        if level == IsolationLevel::Namespaces && network != NetworkAccess::Host {
            return Ok(Self {
                model: 19999,
                proxy: 19998,
            });
        }
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::internal);
        let port = |held: &TcpListener| held.local_addr().map(|at| at.port()).map_err(Error::internal);
        // Both listeners stay open until both ports are known, so that they differ.
        let (model, proxy) = (free()?, free()?);
        Ok(Self {
            model: port(&model)?,
            proxy: port(&proxy)?,
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
    ports: LoopbackPorts,
    minted: Option<String>,
) -> Result<AgentEnvironment> {
    let mut env: IndexMap<String, String> = IndexMap::new();
    for provider in deps.gateway.providers() {
        set_provider_variables(provider, ports, &mut env);
    }
    if plan.network == NetworkAccess::Proxy {
        let proxy = format!("http://127.0.0.1:{}", ports.proxy);
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
            env.insert(name.into(), proxy.clone());
        }
        for name in ["NO_PROXY", "no_proxy"] {
            env.insert(name.into(), "127.0.0.1,localhost,::1".into());
        }
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
            env.insert(name.clone(), deps.trust.expand(value, &*deps.env, &secrets)?);
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
    env.insert(SOCKET_ENV.into(), SOCKET_PATH.into());
    // No local sandbox outlives the server, so the client may hand its streams off.
    env.insert(HANDOFF_SOCKET_ENV.into(), HANDOFF_SOCKET_PATH.into());
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

/// The variable in which common agents expect the name of a provider's model.
fn model_variable(deps: &SessionDeps, provider: &str) -> Option<&'static str> {
    let provider = deps.gateway.providers().find(|known| known.name == provider)?;
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
    let base = format!("http://127.0.0.1:{}/{}", ports.model, provider.name);
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
