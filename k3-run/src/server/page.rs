//! The chat page: three files that are part of the program and ask nobody else for anything.

use axum::Router;
use axum::http::{HeaderName, header};
use axum::response::IntoResponse;
use axum::routing::get;

use super::App;

/// Nothing but these files and this server, and in no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const PARTS: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("page/chat.html")),
    ("/chat.css", "text/css; charset=utf-8", include_str!("page/chat.css")),
    ("/chat.js", "text/javascript; charset=utf-8", include_str!("page/chat.js")),
];

/// Whether this path is of the page.
pub(super) fn is_part(path: &str) -> bool {
    PARTS.iter().any(|part| part.0 == path)
}

pub(super) fn routes() -> Router<App> {
    PARTS.iter().fold(Router::new(), |router, &(path, kind, text)| {
        let headers: [(HeaderName, &str); 4] = [
            (header::CONTENT_TYPE, kind),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        router.route(path, get(async move || (headers, text).into_response()))
    })
}
