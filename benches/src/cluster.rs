//! Several servers on one PostgreSQL.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::{
    clock,
    home::{BenchHome, BenchServer, HomeOptions, RestClient, free_address},
    postgres::BenchPostgres,
};

/// The variable that has the cluster key.
const KEY_VARIABLE: &str = "OUBLIETTE_BENCH_CLUSTER_KEY";
/// How long to wait between two looks at a cluster.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How long a server may take to become a member again before the suite fails.
const MEMBER_TIMEOUT: Duration = Duration::from_secs(60);

/// Servers that share a database and a folder of workspaces.
pub(crate) struct BenchCluster {
    members: Vec<BenchMember>,
    _workspaces: tempfile::TempDir,
}

struct BenchMember {
    home: BenchHome,
    /// None while it is killed.
    server: Option<BenchServer>,
}

impl BenchCluster {
    /// Starts this many servers on a schema of their own, with an agent `talker` that says one word per turn.
    pub(crate) async fn start(postgres: &BenchPostgres, schema: &str, count: usize) -> Result<Self> {
        let url = postgres.create_schema(schema).await?;
        let workspaces = tempfile::tempdir()?;
        let dir = workspaces.path().display().to_string();
        let mut members: Vec<BenchMember> = Vec::with_capacity(count);
        for _ in 0..count {
            let address = free_address()?;
            let config = format!(
                "[server]\nrate_limit = {{ per_second = 1000000 }}\nmax_connections = 100000\n\
                 [cluster]\nadvertise = \"http://{address}\"\nkey_env = \"{KEY_VARIABLE}\"\n\
                 [workspaces]\ndir = {dir:?}"
            );
            let options = HomeOptions {
                env: vec![
                    ("OUBLIETTE_STORE_URL", url.clone()),
                    (KEY_VARIABLE, "a key of the benchmarks".to_owned()),
                ],
                address: Some(address),
                token: members.first().map(|first| first.home.token.clone()),
            };
            let home = BenchHome::with_options(&config, options).await?;
            let server = Some(home.start().await?);
            members.push(BenchMember { home, server });
        }
        let cluster = Self {
            members,
            _workspaces: workspaces,
        };
        let script = json!({"turns": [[{"say": "ok"}]]}).to_string();
        let definition =
            json!({"name": "talker", "prompt": "You are measured.", "model": "script:script.json"});
        let agent = json!({"slug": "talker", "definition": definition, "files": {"script.json": script}});
        cluster
            .connect_rest(0)
            .await?
            .call_tool("agent_put", agent)
            .await?;
        cluster.wait_until_whole().await?;
        Ok(cluster)
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn server(&self, number: usize) -> Result<&BenchServer> {
        let member = self.members.get(number).context("no such server")?;
        member.server.as_ref().context("the server was killed")
    }

    /// A new connection to a server for tool calls over REST.
    pub(crate) async fn connect_rest(&self, number: usize) -> Result<RestClient> {
        self.server(number)?.connect_rest().await
    }

    /// Kills a server with SIGKILL; returns when.
    pub(crate) async fn kill(&mut self, number: usize) -> Result<u64> {
        let member = self.members.get_mut(number).context("no such server")?;
        let server = member.server.take().context("the server was killed already")?;
        server.kill().await
    }

    /// Starts a killed server again and waits until it is one of the cluster.
    pub(crate) async fn start_again(&mut self, number: usize) -> Result<()> {
        let member = self.members.get_mut(number).context("no such server")?;
        member.server = Some(member.home.start().await?);
        self.wait_until_whole().await
    }

    /// Waits until every server runs and knows all others, and nobody else is a member.
    pub(crate) async fn wait_until_whole(&self) -> Result<()> {
        let begun = clock::now();
        loop {
            let mut whole = true;
            for number in 0..self.len() {
                whole &= self.known_servers(number).await.ok() == Some(self.len());
            }
            if whole {
                return Ok(());
            }
            anyhow::ensure!(
                clock::since(begun) < MEMBER_TIMEOUT,
                "the servers do not find each other"
            );
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// How many servers a server knows, itself too.
    async fn known_servers(&self, number: usize) -> Result<usize> {
        let mut rest = self.connect_rest(number).await?;
        let list = rest.call_tool("server_list", json!({})).await?;
        Ok(list["servers"].as_array().map_or(0, Vec::len))
    }

    /// Stops all servers.
    pub(crate) async fn stop(self) -> Result<()> {
        for member in self.members {
            if let Some(server) = member.server {
                server.stop().await?;
            }
        }
        Ok(())
    }
}
