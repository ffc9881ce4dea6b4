//! A reply on its way to the client: as server-sent events, or as one JSON document.
//!
//! Both say something on a clock while there is nothing to tell, for the model may need
//! minutes before its first token, and proxies and clients give silent connections up:
//! events carry a comment with the progress, a document begins with blanks, which JSON
//! allows in front of it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::Value;
use tokio::time::{Interval, MissedTickBehavior};

use super::error::ApiError;
use super::mailbox::{Progress, Reader, Update};

/// The words of one endpoint for a reply.
pub(super) trait Wire: Send + Unpin + 'static {
    /// Adds the stream's chunks for one update.
    fn chunks(&mut self, update: Update, chunks: &mut Vec<Value>);
    /// Takes in one update of a reply that is sent as a whole.
    fn add(&mut self, update: Update);
    /// The whole reply.
    fn body(&mut self) -> Value;
}

/// The response that streams the reply.
pub(super) fn events(reader: Reader, wire: impl Wire, every: Duration) -> Response {
    let events = Events { reader, wire, clock: clock(every), ready: VecDeque::new(), over: false };
    let mut response = Sse::new(events).into_response();
    // nginx keeps a response back unless told not to.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The response that holds the whole reply. Within `every` its status tells how it went;
/// after that the headers go out with 200.
pub(super) async fn document(
    reader: Reader,
    wire: impl Wire,
    every: Duration,
) -> Result<Response, ApiError> {
    let mut document = Document { reader, wire, clock: clock(every), over: false };
    document.clock.reset();
    let early = std::future::poll_fn(|cx| match document.poll_whole(cx) {
        Poll::Ready(whole) => Poll::Ready(Some(whole)),
        Poll::Pending => document.clock.poll_tick(cx).map(|_| None),
    })
    .await;
    match early {
        Some(whole) => Ok(Json(whole?).into_response()),
        None => {
            let headers =
                [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-cache")];
            Ok((headers, Body::from_stream(document)).into_response())
        }
    }
}

/// Ticks at once, then when nothing has been said for so long.
fn clock(every: Duration) -> Interval {
    let mut clock = tokio::time::interval(every);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    clock
}

struct Events<W> {
    reader: Reader,
    wire: W,
    clock: Interval,
    ready: VecDeque<Event>,
    over: bool,
}

impl<W: Wire> Events<W> {
    fn take(&mut self, updates: Option<Vec<Update>>) {
        let mut chunks = Vec::new();
        for update in updates.unwrap_or_else(|| vec![Update::Failed(ApiError::internal())]) {
            match update {
                Update::Failed(error) => {
                    chunks.push(error.body());
                    self.over = true;
                }
                update => {
                    let last = matches!(update, Update::Finish(_));
                    self.wire.chunks(update, &mut chunks);
                    self.over |= last;
                    if last {
                        self.ready.extend(events_of(&mut chunks));
                        self.ready.push_back(Event::default().data("[DONE]"));
                    }
                }
            }
        }
        self.ready.extend(events_of(&mut chunks));
    }
}

/// JSON has no line breaks, so each chunk is one `data:` line.
fn events_of(chunks: &mut Vec<Value>) -> impl Iterator<Item = Event> {
    chunks.drain(..).map(|chunk| Event::default().data(chunk.to_string()))
}

impl<W: Wire> Stream for Events<W> {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(event) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.over {
                return Poll::Ready(None);
            }
            if let Poll::Ready(updates) = this.reader.poll_take(context) {
                this.take(updates);
                this.clock.reset();
                continue;
            }
            ready!(this.clock.poll_tick(context));
            let comment = match this.reader.progress() {
                Progress::Queued(ahead) => format!("queued, {ahead} ahead"),
                Progress::Prefill(done, total) => format!("prefill {done}/{total} tokens"),
                Progress::Decode(tokens) => format!("decode {tokens} tokens"),
            };
            return Poll::Ready(Some(Ok(Event::default().comment(comment))));
        }
    }
}

struct Document<W> {
    reader: Reader,
    wire: W,
    clock: Interval,
    over: bool,
}

impl<W: Wire> Document<W> {
    fn poll_whole(&mut self, context: &mut Context<'_>) -> Poll<Result<Value, ApiError>> {
        loop {
            let Some(updates) = ready!(self.reader.poll_take(context)) else {
                return Poll::Ready(Err(ApiError::internal()));
            };
            for update in updates {
                match update {
                    Update::Failed(error) => return Poll::Ready(Err(error)),
                    update => {
                        let last = matches!(update, Update::Finish(_));
                        self.wire.add(update);
                        if last {
                            return Poll::Ready(Ok(self.wire.body()));
                        }
                    }
                }
            }
        }
    }
}

impl<W: Wire> Stream for Document<W> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(whole) = self.poll_whole(context) {
            self.over = true;
            let text = whole.unwrap_or_else(|error| error.body()).to_string();
            return Poll::Ready(Some(Ok(text.into())));
        }
        ready!(self.clock.poll_tick(context));
        Poll::Ready(Some(Ok(Bytes::from_static(b" "))))
    }
}
