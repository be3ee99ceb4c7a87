//! The gRPC service: requests into operations, and errors into the codes that containerd acts on.

use crate::api::snapshots_server::{Snapshots as Service, SnapshotsServer};
use crate::api::{self, Info};
use crate::database::{Snapshot, SnapshotKind};
use crate::error::Error;
use crate::mounts::Mount;
use crate::snapshots::Snapshots;
use prost_types::Timestamp;
use std::future::Future;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Request, Response, Status};

/// Snapshots in one message of a list.
const LISTED: usize = 100;

/// Answers requests that come in at `listener`, until `end` comes. Requests in progress are ended first.
///
/// # Errors
/// The transport's.
pub async fn serve(
    snapshots: Arc<Snapshots>,
    listener: UnixListener,
    end: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let service = SnapshotsServer::new(Server(snapshots));
    let incoming = UnixListenerStream::new(listener);
    tonic::transport::Server::builder().serve_with_incoming_shutdown(service, incoming, end).await
}

struct Server(Arc<Snapshots>);

impl Server {
    /// Does `work` on a thread that may wait for the disk.
    async fn run<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce(&Snapshots) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Status> {
        let snapshots = self.0.clone();
        let done = tokio::task::spawn_blocking(move || work(&snapshots)).await;
        match done {
            Ok(result) => result.map_err(|error| status(&what, &error)),
            Err(error) => Err(Status::internal(format!("{what}: {error}"))),
        }
    }
}

fn status(what: &str, error: &Error) -> Status {
    let code = match error {
        Error::NotFound(_) => Code::NotFound,
        Error::Exists(_) => Code::AlreadyExists,
        Error::Precondition(_) => Code::FailedPrecondition,
        Error::Invalid(_) => Code::InvalidArgument,
        Error::Image(pagefold_image::Error::Full { .. }) => Code::ResourceExhausted,
        Error::Image(_) | Error::System { .. } => Code::Internal,
    };
    // The others are answers; these are faults of this host.
    if matches!(code, Code::Internal | Code::ResourceExhausted) {
        eprintln!("pagefold-snapshotter: {what}: {error}");
    }
    Status::new(code, error.to_string())
}

fn mounts(mounts: Vec<Mount>) -> Vec<api::Mount> {
    let convert = |mount: Mount| api::Mount {
        r#type: mount.kind.into(),
        source: mount.source,
        target: String::new(),
        options: mount.options,
    };
    mounts.into_iter().map(convert).collect()
}

fn info(snapshot: Snapshot) -> Info {
    let time = |(seconds, nanos): (i64, u32)| Some(Timestamp { seconds, nanos: nanos as i32 });
    let kind = match snapshot.kind {
        SnapshotKind::View => api::Kind::View,
        SnapshotKind::Active => api::Kind::Active,
        SnapshotKind::Committed => api::Kind::Committed,
    };
    Info {
        name: snapshot.name,
        parent: snapshot.parent,
        kind: kind.into(),
        created_at: time(snapshot.created),
        updated_at: time(snapshot.updated),
        labels: snapshot.labels.into_iter().collect(),
    }
}

#[tonic::async_trait]
impl Service for Server {
    async fn prepare(
        &self,
        request: Request<api::PrepareSnapshotRequest>,
    ) -> Result<Response<api::PrepareSnapshotResponse>, Status> {
        let api::PrepareSnapshotRequest { key, parent, labels, .. } = request.into_inner();
        let labels = labels.into_iter().collect();
        let made = self
            .run(format!("prepare {key:?}"), move |all| all.create(SnapshotKind::Active, &key, &parent, labels))
            .await?;
        Ok(Response::new(api::PrepareSnapshotResponse { mounts: mounts(made) }))
    }

    async fn view(
        &self,
        request: Request<api::ViewSnapshotRequest>,
    ) -> Result<Response<api::ViewSnapshotResponse>, Status> {
        let api::ViewSnapshotRequest { key, parent, labels, .. } = request.into_inner();
        let labels = labels.into_iter().collect();
        let made =
            self.run(format!("view {key:?}"), move |all| all.create(SnapshotKind::View, &key, &parent, labels)).await?;
        Ok(Response::new(api::ViewSnapshotResponse { mounts: mounts(made) }))
    }

    async fn mounts(&self, request: Request<api::MountsRequest>) -> Result<Response<api::MountsResponse>, Status> {
        let key = request.into_inner().key;
        let found = self.run(format!("mounts {key:?}"), move |all| all.mounts(&key)).await?;
        Ok(Response::new(api::MountsResponse { mounts: mounts(found) }))
    }

    async fn commit(&self, request: Request<api::CommitSnapshotRequest>) -> Result<Response<()>, Status> {
        let api::CommitSnapshotRequest { name, key, labels, parent, .. } = request.into_inner();
        let labels = labels.into_iter().collect();
        let commit = move |all: &Snapshots| {
            // Only a snapshotter with the capability `rebase` is asked for another parent.
            if !parent.is_empty() && all.stat(&key)?.parent != parent {
                return Err(Error::Invalid(format!("snapshot {key:?} cannot get another parent")));
            }
            all.commit(&name, &key, labels)
        };
        self.run("commit".into(), commit).await.map(Response::new)
    }

    async fn remove(&self, request: Request<api::RemoveSnapshotRequest>) -> Result<Response<()>, Status> {
        let key = request.into_inner().key;
        self.run(format!("remove {key:?}"), move |all| all.remove(&key)).await.map(Response::new)
    }

    async fn stat(
        &self,
        request: Request<api::StatSnapshotRequest>,
    ) -> Result<Response<api::StatSnapshotResponse>, Status> {
        let key = request.into_inner().key;
        let found = self.run(format!("stat {key:?}"), move |all| all.stat(&key)).await?;
        Ok(Response::new(api::StatSnapshotResponse { info: Some(info(found)) }))
    }

    async fn update(
        &self,
        request: Request<api::UpdateSnapshotRequest>,
    ) -> Result<Response<api::UpdateSnapshotResponse>, Status> {
        let api::UpdateSnapshotRequest { info: wanted, update_mask, .. } = request.into_inner();
        let wanted = wanted.ok_or_else(|| Status::invalid_argument("no snapshot is named"))?;
        let (labels, paths) = (wanted.labels.into_iter().collect(), update_mask.unwrap_or_default().paths);
        let updated =
            self.run(format!("update {:?}", wanted.name), move |all| all.update(&wanted.name, &labels, &paths)).await?;
        Ok(Response::new(api::UpdateSnapshotResponse { info: Some(info(updated)) }))
    }

    type ListStream = tokio_stream::Iter<std::vec::IntoIter<Result<api::ListSnapshotsResponse, Status>>>;

    async fn list(&self, request: Request<api::ListSnapshotsRequest>) -> Result<Response<Self::ListStream>, Status> {
        let filters = request.into_inner().filters;
        let found = self.run("list".into(), move |all| all.list(&filters)).await?;
        let infos: Vec<Info> = found.into_iter().map(info).collect();
        let messages: Vec<_> =
            infos.chunks(LISTED).map(|part| Ok(api::ListSnapshotsResponse { info: part.to_vec() })).collect();
        Ok(Response::new(tokio_stream::iter(messages)))
    }

    async fn usage(&self, request: Request<api::UsageRequest>) -> Result<Response<api::UsageResponse>, Status> {
        let key = request.into_inner().key;
        let usage = self.run(format!("usage {key:?}"), move |all| all.usage(&key)).await?;
        let response = api::UsageResponse { size: usage.bytes as i64, inodes: usage.inodes as i64 };
        Ok(Response::new(response))
    }

    async fn cleanup(&self, _: Request<api::CleanupRequest>) -> Result<Response<()>, Status> {
        self.run("cleanup".into(), Snapshots::clean_up).await.map(Response::new)
    }
}
