//! Requests to an agent and the answers to them: one at a time.

use crate::clients::connection::Connection;
use pagefold_merge::client::Gone;
use pagefold_os::fd::Fd;
use pagefold_os::{Errno, sched, sock};
use pagefold_protocol::message::{LIST_MAX, Op, Packet};
use std::sync::Arc;

/// The socket to an agent, and what the next answer must name.
pub(super) struct AgentRequests {
    socket: Arc<Connection>,
    sequence: u64,
}

impl AgentRequests {
    pub(super) fn new(socket: Arc<Connection>) -> AgentRequests {
        AgentRequests { socket, sequence: 0 }
    }

    /// A request; a refusal is an empty answer, not the end.
    pub(super) fn ask(&mut self, op: Op, count: usize, a: u64, b: u64) -> Result<usize, Gone> {
        Ok(self.ask_for(op, count, a, b, &[])?.unwrap_or(0))
    }

    /// A request that carries the descriptors `fds`; the answer's count, or why the agent refuses.
    pub(super) fn ask_for(
        &mut self,
        op: Op,
        count: usize,
        a: u64,
        b: u64,
        fds: &[i32],
    ) -> Result<Result<usize, Errno>, Gone> {
        self.ask_then(op, count, a, b, fds, |_| ())
    }

    /// As [`ask_for`](Self::ask_for); calls `sent` with the socket before it waits for the answer there.
    pub(super) fn ask_then(
        &mut self,
        op: Op,
        count: usize,
        a: u64,
        b: u64,
        fds: &[i32],
        sent: impl FnOnce(&Fd),
    ) -> Result<Result<usize, Errno>, Gone> {
        self.send(op, count, a, b, fds)?;
        sent(&self.socket);
        let mut buffer = [0; size_of::<Packet>()];
        let got = self.socket.receive_plain(&mut buffer).map_err(|_| Gone)?;
        self.answer_of(op, &buffer[..got])
    }

    /// A request that asks for descriptors: whether the agent grants it, and those that came.
    pub(super) fn ask_for_files(&mut self, op: Op, a: u64) -> Result<(bool, sock::Fds), Gone> {
        self.send(op, 0, a, 0, &[])?;
        let mut buffer = [0; size_of::<Packet>()];
        let (got, fds) = sock::receive(&self.socket, &mut buffer, 0).map_err(|_| Gone)?;
        Ok((matches!(self.answer_of(op, &buffer[..got]), Ok(Ok(_))), fds))
    }

    /// Ends the link, and wakes the threads that wait for the other end.
    pub(super) fn shut(&self) {
        self.socket.shut();
    }

    fn send(&mut self, op: Op, count: usize, a: u64, b: u64, fds: &[i32]) -> Result<(), Gone> {
        self.sequence += 1;
        let cpu = sched::cpu().map_or(0, |cpu| cpu + 1);
        let request = Packet { sequence: self.sequence, count: count as u64, a, b, cpu, ..Packet::new(op) };
        sock::send(&self.socket, request.bytes(), fds).map_err(|_| Gone)
    }

    /// What `bytes` say, if they answer the last request, an `op`.
    fn answer_of(&self, op: Op, bytes: &[u8]) -> Result<Result<usize, Errno>, Gone> {
        let answer = Packet::parse(bytes).ok_or(Gone)?;
        if answer.op != op as u32 || answer.sequence != self.sequence || answer.count > LIST_MAX as u64 {
            return Err(Gone);
        }
        Ok(if answer.status == 0 { Ok(answer.count as usize) } else { Err(Errno(answer.status)) })
    }
}
