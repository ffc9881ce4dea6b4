//! Who may use the server.
//!
//! Without keys it serves this machine only, and that must hold in browsers too: a page
//! from elsewhere can send requests to 127.0.0.1, or have its own name point there. So a
//! request from a page of another origin is refused unless that origin was allowed, and
//! so is a request to a name that is not this machine's.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use k3_formats::digest::Digest;

use super::{ApiError, App, ServeOptions};

/// What a request must have.
#[derive(Debug)]
pub(super) struct Access {
    /// Digests of the keys, so that comparing takes the same time for all of them.
    keys: Vec<[u8; 32]>,
    /// Whether the `Host` must be a name of this machine.
    local_names: bool,
    cors: Vec<String>,
}

impl Access {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let digest = |key: &String| Digest::of(key.as_bytes()).to_bytes();
        let keys: Vec<_> = options.api_keys.iter().map(digest).collect();
        let local_names = keys.is_empty() && !options.no_auth;
        Self { keys, local_names, cors: options.cors.clone() }
    }

    fn allows_key(&self, headers: &HeaderMap) -> bool {
        if self.keys.is_empty() {
            return true;
        }
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let bearer = |value: &[u8]| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| Digest::of(key.trim_ascii()).to_bytes())
        };
        let Some(given) = given.and_then(bearer) else { return false };
        // All keys are compared to the end, whatever the outcome.
        let differs = |key: &[u8; 32]| {
            key.iter().zip(&given).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)))
        };
        self.keys.iter().map(differs).fold(false, |found, difference| found | (difference == 0))
    }

    fn allows_host(&self, headers: &HeaderMap) -> bool {
        if !self.local_names {
            return true;
        }
        let Some(host) = text(headers, header::HOST) else { return true };
        is_local(host_name(host))
    }

    /// The value of `Access-Control-Allow-Origin`, if the request is of an allowed page.
    fn cors_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if self.cors.iter().any(|allowed| allowed == "*") {
            return Some(HeaderValue::from_static("*"));
        }
        self.cors
            .iter()
            .any(|allowed| allowed.as_bytes() == origin.as_bytes())
            .then(|| origin.clone())
    }

    /// Whether the request is of no page, or of one of ours.
    fn is_own_origin(headers: &HeaderMap) -> bool {
        let Some(origin) = headers.get(header::ORIGIN) else { return true };
        let origin = origin.to_str().ok().and_then(|o| o.split_once("://"));
        origin.is_some_and(|(_, host)| text(headers, header::HOST) == Some(host))
    }
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or_default())
}

/// A `Host` header without its port.
fn host_name(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

fn is_local(name: &str) -> bool {
    let address = name.parse::<std::net::IpAddr>();
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    address.is_ok_and(|a| a.is_loopback()) || name == "localhost" || name.ends_with(".localhost")
}

/// Checks a request and sets the headers that browsers ask for.
pub(super) async fn check(State(app): State<App>, request: Request, next: Next) -> Response {
    let access = &app.0.access;
    let headers = request.headers();
    let cors = access.cors_origin(headers);
    let preflight = request.method() == Method::OPTIONS
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    // These say nothing about anyone's conversations, and load balancers have no keys.
    let open = request.method() == Method::GET
        && (super::page::is_part(request.uri().path())
            || request.uri().path().starts_with("/health"));
    let mut response = if !access.allows_host(headers) {
        ApiError::forbidden("this host name is not served without an API key").into_response()
    } else if cors.is_none() && !Access::is_own_origin(headers) {
        ApiError::forbidden("pages of this origin may not use this server").into_response()
    } else if preflight {
        StatusCode::NO_CONTENT.into_response()
    } else if !open && !access.allows_key(headers) {
        ApiError::unauthorized().into_response()
    } else {
        next.run(request).await
    };
    if let Some(origin) = cors {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        if preflight {
            let allow = HeaderValue::from_static;
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, allow("GET, POST"));
            headers
                .insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allow("authorization, content-type"));
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, allow("3600"));
        }
    }
    response.headers_mut().insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine() {
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "[::1]:8080", "[::1]", "a.localhost."]
        {
            assert!(is_local(host_name(host)), "{host}");
        }
        for host in
            ["example.org", "localhost.example.org:8080", "10.0.0.1", "127.0.0.1.nip.io", ""]
        {
            assert!(!is_local(host_name(host)), "{host}");
        }
    }

    fn headers(entries: &[(&'static str, &'static str)]) -> HeaderMap {
        let entry = |&(name, value): &(&'static str, &'static str)| {
            (header::HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        entries.iter().map(entry).collect()
    }

    #[test]
    fn keys_are_compared_whole() {
        let digest = |key: &str| Digest::of(key.as_bytes()).to_bytes();
        let keys = vec![digest("alpha"), digest("beta")];
        let access = Access { keys, local_names: false, cors: Vec::new() };
        for good in ["Bearer alpha", "bearer beta", "Bearer  beta "] {
            assert!(access.allows_key(&headers(&[("authorization", good)])), "{good}");
        }
        for bad in ["alpha", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa", "Basic alpha"] {
            assert!(!access.allows_key(&headers(&[("authorization", bad)])), "{bad}");
        }
        assert!(!access.allows_key(&headers(&[])));
    }

    #[test]
    fn pages_from_elsewhere_are_told_apart() {
        let own =
            |origin, host| Access::is_own_origin(&headers(&[("origin", origin), ("host", host)]));
        assert!(own("http://localhost:8080", "localhost:8080"));
        assert!(!own("http://example.org", "localhost:8080"));
        assert!(!own("http://localhost:3000", "localhost:8080"));
        assert!(!own("null", "localhost:8080"));
        assert!(Access::is_own_origin(&headers(&[("host", "localhost:8080")])));
    }
}
