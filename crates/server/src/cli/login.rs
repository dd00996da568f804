//! `oubliette login` and `oubliette context`: servers elsewhere, and which of them commands use.

use std::io::{IsTerminal as _, Read as _};

use oubliette_protocol::{Error, Result};
use secrecy::SecretString;
use serde_json::{Value, json};

use super::{
    CommandContext,
    contexts::{ContextFile, LOCAL, ServerContext, check_server_url},
    output::{field_text, format_listing},
    remote::RemoteServer,
};

/// The variable that holds the token.
pub(crate) const TOKEN_VARIABLE: &str = "OUBLIETTE_TOKEN";
/// Maximum length of a token that is read, in bytes.
const MAX_TOKEN_BYTES: u64 = 4096;

/// Arguments of `oubliette login`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The token is read from stdin, or from OUBLIETTE_TOKEN; it is kept in contexts.json of the home directory, \
    which only you can read.\n\nExamples:\n  oubliette login https://oubliette.example.com\n  \
    oubliette login http://127.0.0.1:8080 --name lab < token.txt"
)]
pub(crate) struct LoginArgs {
    /// The server's URL.
    server: String,
    /// The context's name (default: the URL's host and port).
    #[arg(long)]
    name: Option<String>,
}

/// Arguments of `oubliette context`.
#[derive(Debug, clap::Args)]
pub(crate) struct ContextArgs {
    /// What to do; lists the contexts when left out.
    #[command(subcommand)]
    command: Option<ContextCommand>,
}

/// What `oubliette context` does.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ContextCommand {
    /// List the servers you have logged in to.
    List,
    /// Use a server for the commands that follow; `local` is this machine's home directory.
    Use {
        /// The context's name, or local.
        name: String,
    },
    /// Forget a server and its token.
    Remove {
        /// The context's name.
        name: String,
    },
}

/// Runs `oubliette login`: checks the token with the server before it is kept.
pub(crate) async fn login(args: LoginArgs, context: CommandContext) -> Result<()> {
    let url = check_server_url(&args.server)?;
    let name = args.name.unwrap_or_else(|| default_name(&url));
    let token = read_token()?;
    let remote = RemoteServer::new(url.clone(), token.clone())?;
    let info = remote
        .request(reqwest::Method::POST, "/api/tools/server_info")
        .json(&json!({}));
    let answer = remote.send(info).await?;
    let answer: Value = serde_json::from_slice(&remote.read(answer).await?)
        .map_err(|_| Error::unavailable(format!("{url} is not an Oubliette server")))?;
    let mut file = ContextFile::load(&context.home)?;
    file.add(ServerContext {
        name: name.clone(),
        url: url.clone(),
        token,
    })?;
    file.save(&context.home)?;
    let shown = json!({ "name": name, "url": url, "version": answer["version"] });
    context.output.print_result(&shown, |shown| {
        format!(
            "Logged in to {url} (Oubliette {}). Commands use it from now on; `oubliette context use {LOCAL}` goes back.",
            field_text(shown, "version")
        )
    });
    if url.starts_with("http://") && !is_loopback(&url) {
        context.output.print_hint(
            "the token goes to this server unencrypted: use https:// outside a network you trust",
        );
    }
    Ok(())
}

/// Runs `oubliette context`.
pub(crate) fn run(args: ContextArgs, context: &CommandContext) -> Result<()> {
    let mut file = ContextFile::load(&context.home)?;
    match args.command.unwrap_or(ContextCommand::List) {
        ContextCommand::List => {}
        ContextCommand::Use { name } => {
            file.select(&name)?;
            file.save(&context.home)?;
            context
                .output
                .print_hint(&format!("commands use {name} from now on"));
        }
        ContextCommand::Remove { name } => {
            file.remove(&name)?;
            file.save(&context.home)?;
        }
    }
    let row = |known: &ServerContext| {
        let current = file.current.as_deref() == Some(known.name.as_str());
        json!({ "name": known.name, "url": known.url, "current": current })
    };
    let list = json!({
        "contexts": file.contexts.iter().map(row).collect::<Vec<_>>(),
        "current": file.current.as_deref().unwrap_or(LOCAL),
    });
    context.output.print_result(&list, |list| {
        let mut rows = vec![json!({
            "name": LOCAL,
            "url": context.home.root().display().to_string(),
            "current": file.current.is_none(),
        })];
        rows.extend(list["contexts"].as_array().cloned().unwrap_or_default());
        for row in &mut rows {
            row["current"] = json!(if row["current"] == true { "*" } else { "" });
        }
        format_listing(&rows, &[("", "current"), ("NAME", "name"), ("SERVER", "url")], "")
    });
    Ok(())
}

/// The token from `OUBLIETTE_TOKEN`, else from stdin.
fn read_token() -> Result<SecretString> {
    let mut text = std::env::var(TOKEN_VARIABLE).unwrap_or_default();
    if text.trim().is_empty() {
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            eprintln!("Paste the token, then press Enter and Ctrl-D:");
        }
        stdin
            .lock()
            .take(MAX_TOKEN_BYTES)
            .read_to_string(&mut text)
            .map_err(|error| Error::invalid(format!("stdin: {error}")))?;
    }
    let text = text.trim();
    match !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic()) {
        true => Ok(text.to_owned().into()),
        false => Err(Error::invalid(format!(
            "no token was given: pipe one into this command or set {TOKEN_VARIABLE}; `oubliette token create` on the \
             server makes one"
        ))),
    }
}

/// Host and port of a URL.
fn default_name(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().unwrap_or(rest).to_owned()
}

fn is_loopback(url: &str) -> bool {
    let host = reqwest::Url::parse(url)
        .ok()
        .and_then(|url| url.host_str().map(str::to_owned));
    host.is_some_and(|host| {
        let host = host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    })
}
