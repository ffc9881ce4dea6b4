//! An HTTP server in OpenAI's shape for a model that may need seconds for a token.
//!
//! Two threads besides those that compute: one runs the engine and its slots
//! (`slots`), one runs HTTP. Requests go from one to the other through a bounded queue
//! (`queue`), replies come back through mailboxes that a client can leave at any time
//! (`mailbox`). A prompt is a pure function of its request: what the server remembers
//! makes replies faster, never different.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::anyhow;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use k3_formats::Error;
use k3_formats::container::Container;
use k3_formats::tokenizer::Tokenizer;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::chat::{MAX_REQUEST_BYTES, Markup};
use crate::cli::{Act8, EngineArgs};
use crate::open::{self, Sequences};
use crate::report::say;
use crate::session::SessionOptions;
use crate::state::{kda_bytes, latent_bytes};

mod access;
mod chat_completions;
mod completions;
mod connections;
mod error;
mod generation;
mod mailbox;
mod page;
mod parameters;
mod queue;
mod slots;
mod stats;
mod stream;
mod tokens;
mod wire;

use access::Access;
use error::ApiError;
use generation::{Generation, ReplyOptions};
use mailbox::Reader;
use queue::{Job, Order, Queue, Refused};
use slots::Slots;
use stats::Stats;
use stream::Wire;
use wire::Head;

/// What a sampler keeps for each token of the vocabulary: a logit, a weight, an id.
const SAMPLER_BYTES: usize = 16;
/// Request bodies that are read at the same time.
const MAX_BODIES: usize = 64;
/// Time for the head of a request to arrive.
pub const HEAD_TIME: Duration = Duration::from_secs(30);
/// Time for its body to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Time for clients to take what is left of their replies when the server ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The model and the machine.
    pub engine: EngineArgs,
    /// Address to listen at.
    pub host: IpAddr,
    /// Port to listen at; 0 for any.
    pub port: u16,
    /// Conversations that run side by side.
    pub slots: usize,
    /// What each slot keeps.
    pub session: SessionOptions,
    /// Requests that may wait.
    pub queue: usize,
    /// Keys of which a client must give one; none are asked for if there are none.
    pub api_keys: Vec<String>,
    /// Serve others than this machine without a key.
    pub no_auth: bool,
    /// Origins of pages that may use the server; `*` for all.
    pub cors: Vec<String>,
    /// Name of the model in replies.
    pub model: String,
    /// Silence after which a waiting client is told of progress.
    pub comment_every: Duration,
    /// Time for the head of a request to arrive, counted from the end of the one before.
    pub head_time: Duration,
    /// Time for replies to finish when the server ends.
    pub grace: Duration,
    /// Folder in which the slots' conversations outlive the process.
    pub save_dir: Option<PathBuf>,
    /// Whether SIGINT and SIGTERM end the server.
    pub signals: bool,
}

impl ServeOptions {
    /// A server for this machine alone, with one slot.
    pub fn new(engine: EngineArgs, context: usize) -> Self {
        Self {
            engine,
            host: IpAddr::from([127, 0, 0, 1]),
            port: 0,
            slots: 1,
            session: SessionOptions::conversation(context, 2, None, 0),
            queue: 64,
            api_keys: Vec::new(),
            no_auth: false,
            cors: Vec::new(),
            model: "kimi-k3".into(),
            comment_every: Duration::from_secs(5),
            head_time: HEAD_TIME,
            grace: Duration::from_secs(30),
            save_dir: None,
            signals: false,
        }
    }

    /// Memory that all slots take once their contexts are full, in bytes.
    pub fn slot_bytes(&self, container: &Container) -> u64 {
        let sampler = (container.config.vocab * SAMPLER_BYTES) as u64;
        let session = self.session.memory_bytes(
            &container.config,
            self.layers(container),
            self.engine.kv_type,
        );
        (session + sampler) * self.slots as u64
    }

    fn layers(&self, container: &Container) -> usize {
        self.engine.layers.unwrap_or(usize::MAX).clamp(1, container.config.layers())
    }

    fn sequences(&self, container: &Container) -> Sequences {
        let (layers, context) = (self.layers(container), self.session.context);
        let config = &container.config;
        let state =
            kda_bytes(config, layers) + latent_bytes(config, layers, context, self.engine.kv_type);
        let states = state * self.slots as u64;
        Sequences {
            count: self.slots,
            kept_bytes: self.slot_bytes(container).saturating_sub(states),
        }
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    commands: mpsc::UnboundedSender<Command>,
    http: JoinHandle<anyhow::Result<()>>,
    engine: JoinHandle<anyhow::Result<()>>,
}

/// What moves the server towards its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    /// End; the second time, at once.
    Stop,
    /// Replies have had their time.
    GraceOver,
    /// The engine thread has ended.
    Ended,
}

impl Server {
    /// Listens at once; the engine gets ready in the background, and requests wait for it.
    ///
    /// # Errors
    /// The container cannot be used, the address is taken, or it is open to others without
    /// a key.
    pub fn start(options: ServeOptions) -> anyhow::Result<Self> {
        if !options.host.is_loopback() && options.api_keys.is_empty() && !options.no_auth {
            let problem =
                format!("{} can be reached by others, and no API key is set", options.host);
            let hint = "give --api-key-file, or --no-auth if everyone may use the model";
            return Err(Error::unsupported(problem).hint(hint).into());
        }
        let container = Container::open(&options.engine.container)?;
        let app = App::new(&container, &options)?;
        let listener = TcpListener::bind((options.host, options.port)).map_err(|e| {
            Error::unsupported(format!("cannot listen at {}:{}: {e}", options.host, options.port))
                .hint("give another --port or --host; --port 0 takes any port that is free")
        })?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (commands, received) = mpsc::unbounded_channel();
        let engine = {
            let (app, options) = (app.clone(), options.clone());
            let ended = OnDrop(commands.clone());
            thread::Builder::new().name("engine".into()).spawn(move || {
                let _ended = ended;
                run_engine(&container, &app, &options)
            })?
        };
        let http = {
            let commands = commands.clone();
            thread::Builder::new().name("http".into()).spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                let served =
                    runtime.block_on(run_http(listener, app, &options, commands, received));
                // A client that does not read its reply must not keep the process.
                runtime.shutdown_timeout(Duration::from_millis(100));
                served
            })?
        };
        Ok(Self { address, commands, http, engine })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more requests and ends when the replies are finished; a second call, or
    /// the end of the grace period, cuts them off.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What ended it, if that was a fault.
    pub fn join(self) -> anyhow::Result<()> {
        let joined = |thread: JoinHandle<_>, name| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("the {name} thread has panicked")))
        };
        let http = joined(self.http, "http");
        joined(self.engine, "engine").and(http)
    }
}

/// Tells that the engine thread has ended, however it did.
struct OnDrop(mpsc::UnboundedSender<Command>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        let _ = self.0.send(Command::Ended);
    }
}

fn run_engine(container: &Container, app: &App, options: &ServeOptions) -> anyhow::Result<()> {
    let _closed = EndOnDrop(app);
    let mut args = options.engine.clone();
    args.context = Some(options.session.context);
    // Every slot has a row in a step.
    args.chunk = args.chunk.max(options.slots);
    let mut engine =
        open::engine_for(container, &args, Act8::Experts, options.sequences(container))?;
    engine.prefetch(args.usage_dir().as_deref());
    let shared = &*app.0;
    let places = (&*shared.queue, &shared.stats);
    let mut slots =
        Slots::new(&mut engine, &shared.tokenizer, places, options.slots, &options.session)?;
    if let Some(dir) = &options.save_dir {
        slots.load(dir);
    }
    shared.stats.ready.store(true, Ordering::Release);
    say(format_args!("ready"));
    slots.run();
    match &options.save_dir {
        Some(dir) => slots.save(dir),
        None => Ok(()),
    }
}

/// Refuses all jobs once the engine thread is gone, so that nobody waits for it.
struct EndOnDrop<'a>(&'a App);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.0.queue.end(Order::Stop);
    }
}

async fn run_http(
    listener: TcpListener,
    app: App,
    options: &ServeOptions,
    commands: mpsc::UnboundedSender<Command>,
    mut received: mpsc::UnboundedReceiver<Command>,
) -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (close, closed) = watch::channel(false);
    let serve = connections::serve(listener, router(app.clone()), closed, options.head_time);
    let serve = tokio::spawn(serve);
    if options.signals {
        watch_signals(&commands)?;
    }
    let mut stops = 0;
    while let Some(command) = received.recv().await {
        match command {
            Command::Stop if stops == 0 => {
                stops = 1;
                say(format_args!("no more requests; replies have {:?} to finish", options.grace));
                app.0.queue.end(Order::Finish);
                close.send_replace(true);
                let (commands, grace) = (commands.clone(), options.grace);
                tokio::spawn(async move {
                    tokio::time::sleep(grace).await;
                    let _ = commands.send(Command::GraceOver);
                });
            }
            Command::Stop | Command::GraceOver => app.0.queue.end(Order::Stop),
            Command::Ended => break,
        }
    }
    close.send_replace(true);
    // Connections that do not end by themselves end with the runtime.
    let _ = tokio::time::timeout(FAREWELL, serve).await;
    Ok(())
}

fn watch_signals(commands: &mpsc::UnboundedSender<Command>) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
        let (mut signal, commands) = (signal(kind)?, commands.clone());
        tokio::spawn(async move {
            while signal.recv().await.is_some() {
                let _ = commands.send(Command::Stop);
            }
        });
    }
    Ok(())
}

/// What every handler needs.
#[derive(Clone)]
struct App(Arc<Shared>);

struct Shared {
    tokenizer: Arc<Tokenizer>,
    markup: Markup,
    stop_ids: Vec<u32>,
    queue: Arc<Queue>,
    stats: Stats,
    access: Access,
    model: String,
    context: usize,
    slots: usize,
    slot_bytes: u64,
    comment_every: Duration,
    /// Longest request body in bytes.
    body_bytes: usize,
    bodies: Semaphore,
    requests: AtomicU64,
    /// Makes ids differ from those of the last process.
    nonce: u32,
    started: u64,
}

impl App {
    fn new(container: &Container, options: &ServeOptions) -> anyhow::Result<Self> {
        let tokenizer = open::tokenizer(&container.dir)?;
        let context = options.session.context;
        Ok(Self(Arc::new(Shared {
            markup: Markup::of(&tokenizer)?,
            stop_ids: open::stop_ids(container, &tokenizer)?,
            tokenizer: Arc::new(tokenizer),
            queue: Arc::new(Queue::new(options.queue)),
            stats: Stats::default(),
            access: Access::new(options),
            model: options.model.clone(),
            context,
            slots: options.slots,
            slot_bytes: options.slot_bytes(container),
            comment_every: options.comment_every,
            // A prompt that fits has some four bytes of text for a token; JSON around it,
            // tools and escapes take more.
            body_bytes: MAX_REQUEST_BYTES.min((1 << 20) + context.saturating_mul(32)),
            bodies: Semaphore::new(MAX_BODIES),
            requests: AtomicU64::new(0),
            nonce: fastrand::u32(..),
            started: wire::now(),
        })))
    }

    fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.0.tokenizer
    }

    fn model(&self) -> &str {
        &self.0.model
    }

    fn context(&self) -> usize {
        self.0.context
    }

    /// What the objects of request `number` begin with.
    fn head(&self, kind: &str, number: u64) -> Head {
        Head::new(kind, self.0.nonce, number, self.model())
    }

    /// Queues a request and returns its number and its replies.
    fn submit(
        &self,
        prompt: Vec<u32>,
        turns: Vec<usize>,
        options: ReplyOptions,
    ) -> Result<(u64, Reader), ApiError> {
        let shared = &*self.0;
        let room = shared.context.saturating_sub(prompt.len());
        if room == 0 {
            return Err(ApiError::too_long(prompt.len(), shared.context));
        }
        let generation = Generation::new(
            &shared.tokenizer,
            &shared.markup,
            &shared.stop_ids,
            options,
            &prompt,
            room,
        )?;
        let number = shared.requests.fetch_add(1, Ordering::Relaxed) + 1;
        shared.stats.requests.fetch_add(1, Ordering::Relaxed);
        let (reply, reader) = mailbox::mailbox(&shared.queue);
        match shared.queue.push(Job { number, prompt, turns, generation, reply }) {
            Ok(()) => Ok((number, reader)),
            Err(Refused::Closed) => Err(ApiError::stopping()),
            Err(Refused::Full) => {
                shared.stats.refused.fetch_add(1, Ordering::Relaxed);
                Err(ApiError::busy(shared.stats.retry_after(shared.slots)))
            }
        }
    }

    /// The response for a request that was queued.
    async fn respond(
        &self,
        reader: Reader,
        wire: impl Wire,
        stream: bool,
    ) -> Result<Response, ApiError> {
        let every = self.0.comment_every;
        if stream {
            return Ok(stream::events(reader, wire, every));
        }
        stream::document(reader, wire, every).await
    }
}

/// The body of a request, within bounds of size, time and number.
struct RequestBody(Bytes);

impl FromRequest<App> for RequestBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let shared = &*app.0;
        let Ok(_permit) = shared.bodies.try_acquire() else { return Err(ApiError::busy(1)) };
        let body = tokio::time::timeout(BODY_TIME, Bytes::from_request(request, app)).await;
        match body {
            Ok(Ok(body)) => Ok(Self(body)),
            Ok(Err(e)) if e.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                Err(ApiError::too_large(shared.body_bytes))
            }
            Ok(Err(_)) => Err(ApiError::invalid("", "the body could not be read")),
            Err(_) => Err(ApiError::invalid("", "the body took too long to arrive")),
        }
    }
}

fn router(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(text))
        .route("/v1/tokenize", post(tokenize))
        .route("/tokenize", post(tokenize))
        .route("/v1/detokenize", post(detokenize))
        .route("/detokenize", post(detokenize))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/health", get(ready))
        .route("/health/ready", get(ready))
        .route("/health/live", get(async || Json(json!({"status": "ok"}))))
        .route("/metrics", get(metrics))
        .merge(page::routes())
        .fallback(async || ApiError::not_found("no such path"))
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .layer(DefaultBodyLimit::max(app.0.body_bytes))
        .layer(middleware::from_fn_with_state(app.clone(), access::check))
        .with_state(app)
}

async fn chat(State(app): State<App>, body: RequestBody) -> Result<Response, ApiError> {
    chat_completions::handle(app, body.0).await
}

async fn text(State(app): State<App>, body: RequestBody) -> Result<Response, ApiError> {
    completions::handle(app, body.0).await
}

async fn tokenize(State(app): State<App>, body: RequestBody) -> Result<Json<Value>, ApiError> {
    tokens::tokenize(app, body.0).await
}

async fn detokenize(State(app): State<App>, body: RequestBody) -> Result<Json<Value>, ApiError> {
    tokens::detokenize(app, body.0).await
}

fn model_object(app: &App) -> Value {
    json!({
        "id": app.model(), "object": "model", "created": app.0.started, "owned_by": "k3",
        "max_model_len": app.context(),
    })
}

async fn models(State(app): State<App>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_object(&app)]}))
}

async fn model(
    State(app): State<App>,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id == app.model() {
        Ok(Json(model_object(&app)))
    } else {
        Err(ApiError::not_found("no such model; GET /v1/models says which there is"))
    }
}

/// 200 if requests are worked on at once, else 503.
async fn ready(State(app): State<App>) -> Response {
    let stats = &app.0.stats;
    let status = match app.0.queue.order() {
        Order::Work if stats.ready.load(Ordering::Acquire) => "ready",
        Order::Work => "loading",
        _ => "stopping",
    };
    let code = if status == "ready" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let slots = json!({"all": app.0.slots, "busy": stats.busy()});
    let body = json!({"status": status, "slots": slots, "queued": app.0.queue.waiting()});
    (code, Json(body)).into_response()
}

async fn metrics(State(app): State<App>) -> Response {
    let shared = &*app.0;
    let text = shared.stats.prometheus(shared.queue.waiting(), shared.slots, shared.slot_bytes);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(axum::http::header::CONTENT_TYPE, kind)], text).into_response()
}
