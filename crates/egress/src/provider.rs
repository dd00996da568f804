//! A configured model provider.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use oubliette_protocol::{Error, Result};
use secrecy::{ExposeSecret, SecretString};

/// The request header that carries a provider's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthStyle {
    /// `x-api-key`, and an `anthropic-version` if the client sent none.
    Anthropic,
    /// `x-goog-api-key`.
    Gemini,
    /// `Authorization: Bearer`: OpenAI and providers with a compatible API.
    Bearer,
}

impl AuthStyle {
    /// Guesses the style from the name a provider is configured under and the host of its URL.
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
pub struct ModelProvider {
    /// The first segment of a request's path.
    pub name: String,
    /// Base URL of its requests. If it ends in a version (`…/v1`), that replaces the one in a request's path.
    pub base_url: String,
    /// How the key is sent.
    pub style: AuthStyle,
    /// The environment variable the key was read from, for error texts.
    pub api_key_env: Option<String>,
    /// The key. Without one, requests go out without credentials (a local Ollama or vLLM).
    pub api_key: Option<SecretString>,
    /// Paths allowed besides the model calls of [`crate::paths`], relative to the provider; a `*` at the end of one
    /// matches anything.
    pub allow_paths: Vec<String>,
}

impl ModelProvider {
    /// A provider without a key; its style is guessed from its name and URL.
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

    /// Sets the key.
    #[must_use]
    pub fn with_key(mut self, key: SecretString) -> Self {
        self.api_key = Some(key);
        self
    }

    /// Validates name, URL and key, and returns the parsed URL.
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

    /// Adds the credentials to a request to this provider.
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
