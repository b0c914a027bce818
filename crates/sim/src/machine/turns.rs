//! The machine's thread: whose turn it is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::baton::{Call, ClientId, Next, Shared};
use super::core::{Core, Moved};
use crate::simulation::Simulation;

/// Runs a machine until nobody uses it any more.
pub(super) fn run(shared: &Arc<Shared>, simulation: &Simulation) {
    // Nobody may wait for an answer that does not come.
    let ran = catch_unwind(AssertUnwindSafe(|| Turns::new(shared, simulation).run()));
    shared.end();
    if ran.is_err() {
        tracing::error!("a simulated machine has failed");
    }
}

struct Turns {
    shared: Arc<Shared>,
    core: Core,
    /// Whether turns are drawn by the seed.
    random: bool,
    /// The client whose turn came last.
    last: Option<ClientId>,
    /// Clients that have had a turn since the GPUs had one.
    served: usize,
}

impl Turns {
    fn new(shared: &Arc<Shared>, simulation: &Simulation) -> Self {
        let core = Core::new(Arc::clone(shared), simulation);
        let random = simulation.seed.is_some();
        Self { shared: Arc::clone(shared), core, random, last: None, served: 0 }
    }

    fn run(mut self) {
        while let Next::Waiting { mut clients, all } = self.shared.next() {
            self.order(&mut clients);
            let gpus_first = match self.random {
                true => self.core.gpus.choose(2) == 0,
                // The GPUs run beside the clients, not after them.
                false => self.served >= clients.len(),
            };
            if gpus_first {
                self.served = 0;
                if matches!(self.core.run_gpus(), Moved::Streams) {
                    self.shared.streams_moved();
                }
            }
            if !self.serve(&clients) {
                self.nobody_is_ready(&clients, all);
            }
        }
    }

    /// In the order in which they are looked at: in turn, or by chance.
    fn order(&mut self, clients: &mut [(ClientId, Option<Call>)]) {
        if self.random {
            for i in 0..clients.len() {
                clients.swap(i, i + self.core.gpus.choose(clients.len() - i));
            }
            return;
        }
        let next = clients.iter().position(|(id, _)| Some(*id) > self.last);
        clients.rotate_left(next.unwrap_or(0));
    }

    /// Gives the baton to the first client that can have it; says whether there was one.
    fn serve(&mut self, clients: &[(ClientId, Option<Call>)]) -> bool {
        self.core.forget_wakes();
        for (id, call) in clients {
            // SAFETY: the call is of a client that waits for its answer, and this is the machine's
            // thread.
            if call.is_none_or(|call| unsafe { call.poll(&self.core) }) {
                self.core.tick();
                self.core.gpus.look_again();
                self.last = Some(*id);
                self.served += 1;
                self.shared.give_turn(*id);
                return true;
            }
        }
        false
    }

    /// All clients wait for something that has to happen.
    fn nobody_is_ready(&mut self, clients: &[(ClientId, Option<Call>)], all: bool) {
        self.served = 0;
        match self.core.run_gpus() {
            Moved::Streams => self.shared.streams_moved(),
            Moved::Something => {}
            Moved::Nothing if self.core.pass_deadline() => {}
            Moved::Nothing if !all => self.shared.wait_for_outsiders(),
            Moved::Nothing => {
                // One of them hears of it; the others hear of that one.
                self.core.tell_deadlock();
                let told = self.serve(clients);
                self.core.forget_deadlock();
                assert!(told, "every call that waits ends when nothing can go on");
            }
        }
    }
}
