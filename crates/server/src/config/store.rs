//! `[store]`: where the database is.

use oubliette_protocol::Result;
use oubliette_store::DatabaseUrl;

use super::{EnvLookup, field_error, raw::RawStore};

/// The variable that is used in the place of `[store] url`.
pub(crate) const STORE_URL_VARIABLE: &str = "OUBLIETTE_STORE_URL";

/// The PostgreSQL database to use; none: the file in the home.
pub(super) fn resolve(raw: RawStore, env: EnvLookup<'_>) -> Result<Option<DatabaseUrl>> {
    let of_environment = env(STORE_URL_VARIABLE).filter(|url| !url.is_empty());
    let (field, url) = match (of_environment, raw.url) {
        (Some(url), _) => (STORE_URL_VARIABLE, url),
        (None, Some(url)) => ("store.url", url.0),
        (None, None) => return Ok(None),
    };
    let url = url
        .parse()
        .map_err(|error| field_error(field, format!("{error}")))?;
    Ok(Some(url))
}
