//! `oubliette up`: runs the server; on the first run creates configuration, samples and an admin token.

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{
    CommandContext,
    mcp_config::{TOKEN_PLACEHOLDER, shell_quote},
    serve::{self, ServeEnd},
    server_url,
};
use crate::{app::App, doors::net, first_run, lifecycle, restart::ProgramStart};

/// Runs `oubliette up`.
pub(crate) async fn run(args: serve::ListenArgs, context: CommandContext) -> Result<()> {
    let program = ProgramStart::of_this_process();
    let mut stop = serve::ShutdownSignals::listen()?;
    serve::ensure_not_running(&context).await?;
    context.require_home("up")?;
    first_run::create_home(&context.home)?;
    let settings = serve::load_settings(&args, &context)?;
    let token = populate_new_home(&settings).await?;
    let Some(running) = serve::start(settings, &mut stop).await? else {
        return Ok(());
    };
    server_url::publish(&running);
    let url = running.url();
    let config = mcp_client_config(&url, token.as_deref().unwrap_or(TOKEN_PLACEHOLDER));
    let kept = running.app.home.admin_token_path();
    let mut shape = json!({
        "url": format!("{url}/"),
        "mcp_url": format!("{url}/mcp"),
        "home": running.app.home.root(),
        "admin_token_file": kept,
        "mcp_config": config,
    });
    if let Some(token) = &token {
        shape["token"] = json!(token);
    }
    context.output.print_result(&shape, |_| {
        let shown = match &token {
            Some(token) => format!("{token}\n              (admin; shown this once, kept in {})", kept.display()),
            None => format!("the admin token is in {}", kept.display()),
        };
        let flag = context.home_flag();
        let pasted = serde_json::to_string_pretty(&config).unwrap_or_default();
        format!(
            "Oubliette is running.\n\n  Console     {url}/\n  MCP         {url}/mcp\n  Token       {shown}\n\n\
             For an MCP client (`oubliette mcp-config CLIENT` has it for yours):\n\n{pasted}\n\n\
             Try it in another terminal:  {program}{flag} run --agent demo \"Show me around\"\n",
            program = program_to_type()
        )
    });
    match stop.serve_until_signal(running).await? {
        ServeEnd::Stopped => Ok(()),
        ServeEnd::Fenced => program.restart(stop.wait_for_end()).await,
    }
}

/// What a user types to run this program: its name if the shell finds it by that, else its path.
fn program_to_type() -> String {
    const NAME: &str = "oubliette";
    let Ok(program) = std::env::current_exe() else {
        return NAME.to_owned();
    };
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let first = std::env::split_paths(&folders)
        .map(|folder| folder.join(NAME))
        .find(|path| path.is_file());
    // Both as the links in them lead, since that is how the kernel names a running program.
    match first.is_some_and(|first| first.canonicalize().is_ok_and(|first| first == program)) {
        true => NAME.to_owned(),
        false => shell_quote(&program.to_string_lossy()),
    }
}

/// Creates samples and the admin token in a new home, before the server accepts requests. Returns the token if one
/// was made. Binds the port first: were it taken, the start would fail and the token, shown only once, be lost.
async fn populate_new_home(settings: &lifecycle::ServeOptions) -> Result<Option<String>> {
    if settings.home.admin_token_path().exists() {
        return Ok(None);
    }
    drop(net::bind(settings.config.listen, &settings.home).await?);
    let app = App::open(settings.home.clone(), settings.config.clone()).await?;
    let token = first_run::populate(&app).await;
    app.close().await;
    token
}

/// The `mcpServers` block that most MCP clients read.
pub(crate) fn mcp_client_config(url: &str, token: &str) -> Value {
    json!({ "mcpServers": { "oubliette": {
        "type": "http",
        "url": format!("{url}/mcp"),
        "headers": { "Authorization": format!("Bearer {token}") },
    } } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_on_the_path_is_typed_by_its_path() {
        // The test's own program is not called oubliette.
        let program = std::env::current_exe().unwrap();
        assert_eq!(program_to_type(), shell_quote(&program.to_string_lossy()));
    }
}
