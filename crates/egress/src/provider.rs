//! A configured model provider.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use oubliette_protocol::{Error, Result};
use secrecy::{ExposeSecret, SecretString};

/// How a provider wants to see its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthStyle {
    /// `x-api-key`, and an `anthropic-version` if the client sent none.
    Anthropic,
    /// `x-goog-api-key`.
    Gemini,
    /// `Authorization: Bearer`: OpenAI and everyone who speaks its API.
    Bearer,
}

impl AuthStyle {
    /// The style of a provider by the name it is configured under and where it is.
    pub fn guess(name: &str, base_url: &str) -> Self {
        let host = reqwest::Url::parse(base_url)
            .ok()
            .and_then(|u| u.host_str().map(str::to_owned));
        let host = host.unwrap_or_default();
        match name {
            "anthropic" => AuthStyle::Anthropic,
            "gemini" | "google" => AuthStyle::Gemini,
            _ if host == "api.anthropic.com" => AuthStyle::Anthropic,
            _ if host == "generativelanguage.googleapis.com" && !base_url.contains("/openai") => {
                AuthStyle::Gemini
            }
            _ => AuthStyle::Bearer,
        }
    }
}

/// `[providers.<name>]`, its key already read from the server's environment.
#[derive(Debug, Clone)]
pub struct Provider {
    /// The first segment of a request's path.
    pub name: String,
    /// Where requests go. May end in a version (`…/v1`); then the client's own version is dropped.
    pub base_url: String,
    /// How the key is shown.
    pub style: AuthStyle,
    /// Where the key was read from, for error texts.
    pub api_key_env: Option<String>,
    /// The key. Without one the request goes out without credentials (a local Ollama or vLLM).
    pub api_key: Option<SecretString>,
    /// Paths allowed besides the model calls every provider has, relative to the provider.
    pub allow_paths: Vec<String>,
}

impl Provider {
    /// A provider without a key; its style guessed from name and address.
    pub fn new(name: impl Into<String>, base_url: impl Into<String>) -> Self {
        let (name, base_url) = (name.into(), base_url.into());
        let style = AuthStyle::guess(&name, &base_url);
        Self {
            name,
            base_url,
            style,
            api_key_env: None,
            api_key: None,
            allow_paths: Vec::new(),
        }
    }

    /// With a key.
    #[must_use]
    pub fn with_key(mut self, key: SecretString) -> Self {
        self.api_key = Some(key);
        self
    }

    /// Checks what a config file may have got wrong.
    pub(crate) fn check(&self) -> Result<reqwest::Url> {
        let name = &self.name;
        if name.is_empty()
            || !name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        {
            return Err(Error::invalid(format!(
                "provider name {name:?}: use letters, digits, '-', '_' and '.' (it is a part of a URL)"
            )));
        }
        let url = reqwest::Url::parse(&self.base_url)
            .map_err(|e| Error::invalid(format!("providers.{name}.base_url {:?}: {e}", self.base_url)))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(Error::invalid(format!(
                "providers.{name}.base_url: must be http:// or https://"
            )));
        }
        if !url.username().is_empty()
            || url.password().is_some()
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(Error::invalid(format!(
                "providers.{name}.base_url: no user, password, query or fragment; the key belongs in the environment \
                 variable that api_key_env names"
            )));
        }
        if let Some(key) = &self.api_key
            && HeaderValue::from_str(key.expose_secret()).is_err()
        {
            return Err(Error::invalid(format!(
                "providers.{name}: the key in {} has characters that no HTTP header can carry (a line break?)",
                self.api_key_env.as_deref().unwrap_or("the environment")
            )));
        }
        Ok(url)
    }

    /// Adds the credentials to an upstream request.
    pub(crate) fn authorise(&self, headers: &mut HeaderMap) {
        if self.style == AuthStyle::Anthropic && !headers.contains_key("anthropic-version") {
            headers.insert(
                HeaderName::from_static("anthropic-version"),
                HeaderValue::from_static("2023-06-01"),
            );
        }
        let Some(key) = &self.api_key else { return };
        let (name, text) = match self.style {
            AuthStyle::Anthropic => (
                HeaderName::from_static("x-api-key"),
                key.expose_secret().to_owned(),
            ),
            AuthStyle::Gemini => (
                HeaderName::from_static("x-goog-api-key"),
                key.expose_secret().to_owned(),
            ),
            AuthStyle::Bearer => (header::AUTHORIZATION, format!("Bearer {}", key.expose_secret())),
        };
        if let Ok(mut value) = HeaderValue::from_str(&text) {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
}
