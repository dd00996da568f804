//! What an agent finds in its environment: where its model and its tools are, and whatever its project,
//! workspace and definition set.

use std::net::{Ipv4Addr, TcpListener};

use indexmap::IndexMap;
use oubliette_egress::{AuthStyle, Provider};
use oubliette_protocol::{
    Error, Result,
    agent::{Network, Runtime},
    relay::{KEY_ENV, SOCKET_ENV, SOCKET_PATH},
};
use oubliette_sandbox::Level;
use oubliette_tools::Secrets;
use serde_json::json;

use crate::{blueprint::Blueprint, ports::Deps};

/// Where the model forwarder and the proxy listen inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) model: u16,
    pub(crate) proxy: u16,
}

impl Ports {
    /// In a network of its own a sandbox has the ports everyone knows. On the host's it shares them with
    /// every other sandbox and the rest of the machine, and takes two that are free now.
    pub(crate) fn choose(network: Network, level: Level) -> Result<Self> {
        if level == Level::Namespaces && network != Network::Host {
            return Ok(Self {
                model: 19999,
                proxy: 19998,
            });
        }
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::internal);
        let port = |held: &TcpListener| held.local_addr().map(|at| at.port()).map_err(Error::internal);
        // Both are held until both are known, so that they differ.
        let (model, proxy) = (free()?, free()?);
        Ok(Self {
            model: port(&model)?,
            proxy: port(&proxy)?,
        })
    }
}
/// Stands where SDKs insist on a key: the real one is added outside.
const NO_KEY: &str = "kept-outside-the-sandbox";
/// A variable can be no longer than the kernel's 128 KiB.
const LONGEST: usize = 100 * 1024;
/// Where a longer configuration lies inside, and its name in the agent's home.
pub(crate) const CONFIG_FILE: &str = ".oubliette-agent.json";

/// The environment of the agent and of its `oubliette-client`.
pub(crate) struct Surroundings {
    pub(crate) agent: Vec<(String, String)>,
    pub(crate) client: Vec<(String, String)>,
    /// Configuration too long for a variable: to be written to [`CONFIG_FILE`].
    pub(crate) config_file: Option<String>,
}

/// Later ones win: model, proxy, project, workspace, agent, runtime; then what is not theirs to set.
pub(crate) fn surroundings(
    deps: &Deps,
    plan: &Blueprint,
    ports: Ports,
    minted: Option<String>,
) -> Result<Surroundings> {
    let mut env: IndexMap<String, String> = IndexMap::new();
    for provider in deps.gateway.providers() {
        point_to(provider, ports, &mut env);
    }
    if plan.network == Network::Proxy {
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
    // What is read from the server's environment is for the agent; its values are hidden elsewhere.
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
        Runtime::Acp { env: more, .. } => expand(more)?,
        Runtime::Builtin {} => {
            let config = json!({
                "prompt": definition.prompt,
                "model": definition.model,
                "script": plan.script,
                "base_url": format!("http://127.0.0.1:{}", ports.model),
            })
            .to_string();
            let value = match config.len() > LONGEST {
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
    if let Some(key) = minted {
        // A key of one's own says more than the wish for one.
        env.entry(KEY_ENV.into()).or_insert(key);
    }
    let client = [SOCKET_ENV, KEY_ENV]
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), env.get(*name)?.clone())));
    let client = client.collect();
    Ok(Surroundings {
        agent: env.into_iter().collect(),
        client,
        config_file,
    })
}

/// The variable by which agents we know take their model.
fn model_variable(deps: &Deps, provider: &str) -> Option<&'static str> {
    let provider = deps.gateway.providers().find(|known| known.name == provider)?;
    Some(match provider.style {
        AuthStyle::Anthropic => "ANTHROPIC_MODEL",
        AuthStyle::Gemini => "GEMINI_MODEL",
        AuthStyle::Bearer => "OPENAI_MODEL",
    })
}

/// Points the agents we know to the forwarder, by the variables their SDKs read.
fn point_to(provider: &Provider, ports: Ports, env: &mut IndexMap<String, String>) {
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
    env.extend(keys.iter().map(|name| ((*name).to_owned(), NO_KEY.to_owned())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_that_share_a_network_do_not_share_ports() {
        let alone = Ports::choose(Network::Proxy, Level::Namespaces).unwrap();
        assert_eq!((alone.model, alone.proxy), (19999, 19998));
        for (network, level) in [
            (Network::Host, Level::Namespaces),
            (Network::None, Level::Landlock),
        ] {
            let ports = Ports::choose(network, level).unwrap();
            // Taken by us, or by whoever was quicker.
            let _taken =
                [ports.model, ports.proxy].map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)));
            let others = Ports::choose(network, level).unwrap();
            assert!(ports != others && ports.model != ports.proxy && others.model != ports.proxy);
        }
    }
}
