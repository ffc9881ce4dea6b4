//! Connections: a bounded number at a time, each with a time for its headers, so that
//! clients that say nothing, or a byte now and then, do not keep others out for ever.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// Connections at the same time; others wait in the backlog of the system.
const MAX_CONNECTIONS: usize = 512;
/// Pause after the system refused a connection, most often for want of file handles.
const AFTER_REFUSAL: Duration = Duration::from_millis(200);

/// Serves until `closed` turns true, then lets the requests under way end. A connection is
/// closed that has not sent the whole head of a request within `head_time`, be it its first
/// or a later one.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    mut closed: watch::Receiver<bool>,
    head_time: Duration,
) {
    let graceful = Arc::new(GracefulShutdown::new());
    let accepting = tokio::spawn(accept(listener, router, Arc::clone(&graceful), head_time));
    let _ = closed.wait_for(|closed| *closed).await;
    accepting.abort();
    // Its share of `graceful` goes with it.
    let _ = accepting.await;
    if let Ok(graceful) = Arc::try_unwrap(graceful) {
        graceful.shutdown().await;
    }
}

async fn accept(
    listener: TcpListener,
    router: Router,
    graceful: Arc<GracefulShutdown>,
    head_time: Duration,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_time);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(AFTER_REFUSAL).await;
            continue;
        };
        // Tokens are small and should leave at once; refused, they leave a little later.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // How a connection ends is the client's business.
            let _ = connection.await;
            drop(place);
        });
    }
}
