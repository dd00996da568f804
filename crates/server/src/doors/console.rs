//! `/`: the console's files, and `/docs/`: the book's. Both are compiled into the program. Every unknown path ends here
//! with a 404.

use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};

use sha2::{Digest as _, Sha256};

use super::reply;

// `CONSOLE_FILES`: what `ui/` built; `BOOK_FILES`: what `cargo xtask docs` built; or a page that says how; see build.rs.
include!(concat!(env!("OUT_DIR"), "/console.rs"));
include!(concat!(env!("OUT_DIR"), "/book.rs"));

/// The Content-Security-Policy of both: only scripts, styles and requests of this server; nothing inline, no frames.
const PAGE_CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; \
    connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves a file of the console or the book, or a 404.
pub(crate) async fn serve(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let path = uri.path();
    let reads = method == Method::GET || method == Method::HEAD;
    if path == "/docs" && reads {
        // The book's links are relative to its folder.
        return (StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, "/docs/")]).into_response();
    }
    let (files, file) = match path.strip_prefix("/docs/") {
        Some(file) => (BOOK_FILES, file),
        None => (CONSOLE_FILES, path.trim_start_matches('/')),
    };
    let file = if file.is_empty() { "index.html" } else { file };
    let found = files.binary_search_by_key(&file, |(name, _)| name);
    let Some((_, bytes)) = found.ok().map(|at| files[at]) else {
        return reply::not_found(path);
    };
    if !reads {
        return reply::method_not_allowed("GET");
    }
    let tag = format!("\"{}\"", hex::encode(&Sha256::digest(bytes)[..16]));
    if headers
        .get(header::IF_NONE_MATCH)
        .is_some_and(|v| v.as_bytes() == tag.as_bytes())
    {
        return StatusCode::NOT_MODIFIED.into_response();
    }
    // Files under `assets/` have a hash in their name, so their content never changes; others have none.
    let cache = match file.starts_with("assets/") {
        true => "public, max-age=31536000, immutable",
        false => "no-cache",
    };
    let mut response = bytes.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type(file)));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(PAGE_CSP),
    );
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

fn content_type(file: &str) -> &'static str {
    match file.rsplit('.').next().unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "json" | "map" => "application/json",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "ico" => "image/x-icon",
        "woff2" => "font/woff2",
        "webmanifest" => "application/manifest+json",
        "txt" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}
