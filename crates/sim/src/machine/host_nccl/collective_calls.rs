//! NCCL's collective functions, which check their arguments and enqueue a simulated collective.

use std::ffi::{c_int, c_void};
use std::fmt::Write;

use devcomm_sys::driver::CUevent;
use devcomm_sys::nccl::{API_MAGIC, CollConfig, RawComm, RawStream, UNDEF_INT};

use super::batch::Operation;
use super::call::{NcclError, UNHANDLED_CUDA_ERROR, call};
use super::collective::{Collective, Kind, data_type};
use super::config::{list, text_of};
use super::operator::Operator;

/// The arguments of a call; `op` and `root` are `None` for collectives without them.
struct CollectiveArgs {
    name: &'static str,
    kind: Kind,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: c_int,
    op: Option<c_int>,
    root: Option<c_int>,
    comm: RawComm,
    stream: RawStream,
    config: *const CollConfig,
}

impl CollectiveArgs {
    /// Enqueues the collective.
    ///
    /// # Safety
    ///
    /// `config` is NULL, or its strings are NUL-terminated and its list NULL-terminated.
    unsafe fn launch(self) -> c_int {
        let Self { name, kind, send, recv, count, data_type: raw, op, root, comm, stream, .. } =
            self;
        call(name, comm, |cx| {
            // SAFETY: the caller passes NULL or a valid configuration.
            let config = unsafe { self.config.as_ref() };
            cx.note(|| self.describe(config));
            let initialized = |config: &CollConfig| {
                config.size == size_of::<CollConfig>() && config.magic == API_MAGIC
            };
            if !config.is_none_or(initialized) {
                return Err(NcclError::argument("the configuration was not initialized"));
            }
            let rank_comm = cx.live(comm)?;
            let (shared, rank) = rank_comm.joined()?;
            let data_type = data_type(raw)?;
            let collective = Collective {
                kind,
                send: send.expose_provenance(),
                recv: recv.expose_provenance(),
                count,
                data_type,
                operator: Operator::of(&rank_comm, op.unwrap_or(0), data_type)?,
                root: shared.rank(root.unwrap_or(0), "root")?,
            };
            let total = count.checked_mul(data_type.size() * shared.n_ranks());
            if total.is_none() {
                return Err(NcclError::argument(format!("{count} elements are too many")));
            }
            let (reads, writes) = collective.bytes(rank, shared.n_ranks());
            cx.check_access(&rank_comm, collective.send, reads)?;
            cx.check_access(&rank_comm, collective.recv, writes)?;
            if collective.needs_missing_kernel()
                && (shared.n_ranks() > 1 && shared.lsa_size() == shared.n_ranks())
                && cx.is_in_window(&rank_comm, collective.send, reads)
                && cx.is_in_window(&rank_comm, collective.recv, writes)
            {
                let text = "invalid device function: NCCL has no symmetric kernel for an average";
                return Err(NcclError::new(UNHANDLED_CUDA_ERROR, text));
            }
            if kind == Kind::AllToAll && collective.send.abs_diff(collective.recv) < reads {
                return Err(NcclError::argument("an in-place all-to-all"));
            }
            let event = config.map(|config| config.launch_completion_event.cast());
            let event = event.filter(|event: &CUevent| !event.is_null());
            let event = event.map(|event| cx.core.event(event)).transpose()?;
            let stream = cx.stream(&rank_comm, stream)?;
            let operation = Operation::Collective(collective);
            cx.launch(&rank_comm, |launches| launches.add(&rank_comm, stream, operation, event))
        })
    }

    /// Returns the arguments as text, for the record of calls.
    fn describe(&self, config: Option<&CollConfig>) -> String {
        let mut text = format!("{} type {}", self.count, self.data_type);
        let optional = [(" op", self.op), (" root", self.root)];
        for (name, value) in optional.into_iter().filter_map(|(name, v)| Some((name, v?))) {
            let _ = write!(text, "{name} {value}");
        }
        let Some(config) = config else { return text };
        text += " config";
        for (name, value) in [("min_ctas", config.min_ctas), ("max_ctas", config.max_ctas)] {
            if value != UNDEF_INT {
                let _ = write!(text, " {name} {value}");
            }
        }
        // SAFETY: the program passes NULL or a NUL-terminated text, as NCCL requires.
        if let Some(selection) = unsafe { text_of(config.alg_selection) } {
            let _ = write!(text, " selection {selection}");
        }
        if config.user_profiler_tag != 0 {
            let _ = write!(text, " tag {}", config.user_profiler_tag);
        }
        if !config.launch_completion_event.is_null() {
            text += " event";
        }
        // SAFETY: the program passes a NULL-terminated list, as NCCL requires.
        let options = unsafe { list(config.ext, |option| option.next) }.len();
        if options > 0 {
            let _ = write!(text, " options {options}");
        }
        text
    }
}

/// Makes the arguments of a call. (`[$($op)?].first()` is `None` if there is no `$op`.)
macro_rules! args {
    ($symbol:literal, $kind:ident, ($($op:ident)?) ($($root:ident)?), $($field:ident),*) => {
        CollectiveArgs {
            name: $symbol,
            kind: Kind::$kind,
            op: [$($op)?].first().copied(),
            root: [$($root)?].first().copied(),
            $($field),*
        }
    };
}

/// Declares each collective's functions, without and with a configuration.
macro_rules! collectives {
    ($( $name:ident $with_config:ident $kind:ident ($symbol:literal, $config_symbol:literal)
        ($($op:ident)?) ($($root:ident)?); )*) => { $(
        pub(super) unsafe extern "C" fn $name(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            data_type: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: RawComm,
            stream: RawStream,
        ) -> c_int {
            let config = std::ptr::null();
            let args = args!($symbol, $kind, ($($op)?) ($($root)?), send, recv, count, data_type,
                comm, stream, config);
            // SAFETY: there is no configuration.
            unsafe { args.launch() }
        }

        pub(super) unsafe extern "C" fn $with_config(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            data_type: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: RawComm,
            stream: RawStream,
            config: *const CollConfig,
        ) -> c_int {
            let args = args!($config_symbol, $kind, ($($op)?) ($($root)?), send, recv, count,
                data_type, comm, stream, config);
            // SAFETY: the program passes NULL or a valid configuration, as NCCL requires.
            unsafe { args.launch() }
        }
    )* };
}

collectives! {
    all_reduce all_reduce_config AllReduce ("ncclAllReduce", "ncclAllReduceConfig") (op) ();
    broadcast broadcast_config Broadcast ("ncclBroadcast", "ncclBroadcastConfig") () (root);
    reduce reduce_config Reduce ("ncclReduce", "ncclReduceConfig") (op) (root);
    all_gather all_gather_config AllGather ("ncclAllGather", "ncclAllGatherConfig") () ();
    reduce_scatter reduce_scatter_config ReduceScatter
        ("ncclReduceScatter", "ncclReduceScatterConfig") (op) ();
    all_to_all all_to_all_config AllToAll ("ncclAlltoAll", "ncclAlltoAllConfig") () ();
    gather gather_config Gather ("ncclGather", "ncclGatherConfig") () (root);
    scatter scatter_config Scatter ("ncclScatter", "ncclScatterConfig") () (root);
}

/// Enqueues a broadcast in place.
pub(super) unsafe extern "C" fn bcast(
    buffer: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (send, recv, config) = (buffer.cast_const(), buffer, std::ptr::null());
    let args =
        args!("ncclBcast", Broadcast, ()(root), send, recv, count, data_type, comm, stream, config);
    // SAFETY: there is no configuration.
    unsafe { args.launch() }
}
