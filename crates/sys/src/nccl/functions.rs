//! NCCL's host functions: all that 2.32.3 declares and exports.
//!
//! Two functions that are declared for Windows only are omitted, and also
//! `ncclCftBarrierCreateRequirement`, which is declared but not exported.

use std::ffi::{c_char, c_int, c_uint, c_void};

use devcomm_types::DevComm;
use devcomm_types::nccl::{GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle, Team};

use super::abi::{
    CollConfig, CommProperties, Config, EncryptionConfig, ParamHandle, RawComm, RawStream,
    RawUniqueId, RawWaitSignal, RawWindow, Requirements, ResourceRequirements, SimInfo,
};

/// Passes the list of NCCL's functions to another macro: Rust name, symbol, first version,
/// prototype. The types are those of [`nccl`](crate::nccl), `devcomm_types` and `std::ffi`.
#[macro_export]
macro_rules! nccl_functions {
    ($callback:ident) => {
        $callback! {
            // Version, errors, diagnostics.
            get_version = "ncclGetVersion" since (2, 3, 5) (version: *mut c_int) -> c_int;
            get_error_string = "ncclGetErrorString" since (2, 3, 5)
                (result: c_int) -> *const c_char;
            get_last_error = "ncclGetLastError" since (2, 13, 4) (comm: RawComm) -> *const c_char;
            comm_get_async_error = "ncclCommGetAsyncError" since (2, 4, 2)
                (comm: RawComm, state: *mut c_int) -> c_int;
            reset_debug_init = "ncclResetDebugInit" since (2, 24, 3) () -> ();
            set_encryption = "ncclSetEncryption" since (2, 31, 0)
                (config: *const EncryptionConfig) -> c_int;
            // Communicators.
            get_unique_id = "ncclGetUniqueId" since (2, 3, 5)
                (unique_id: *mut RawUniqueId) -> c_int;
            comm_init_rank = "ncclCommInitRank" since (2, 3, 5)
                (comm: *mut RawComm, n_ranks: c_int, id: RawUniqueId, rank: c_int) -> c_int;
            comm_init_rank_config = "ncclCommInitRankConfig" since (2, 14, 3)
                (comm: *mut RawComm, n_ranks: c_int, id: RawUniqueId, rank: c_int,
                 config: *mut Config) -> c_int;
            comm_init_rank_scalable = "ncclCommInitRankScalable" since (2, 23, 4)
                (out: *mut RawComm, n_ranks: c_int, rank: c_int, n_ids: c_int,
                 comm_ids: *mut RawUniqueId, config: *mut Config) -> c_int;
            comm_init_all = "ncclCommInitAll" since (2, 3, 5)
                (comm: *mut RawComm, n_devices: c_int, devices: *const c_int) -> c_int;
            comm_finalize = "ncclCommFinalize" since (2, 14, 3) (comm: RawComm) -> c_int;
            comm_destroy = "ncclCommDestroy" since (2, 3, 5) (comm: RawComm) -> c_int;
            comm_abort = "ncclCommAbort" since (2, 4, 2) (comm: RawComm) -> c_int;
            comm_revoke = "ncclCommRevoke" since (2, 28, 7)
                (comm: RawComm, revoke_flags: c_int) -> c_int;
            comm_split = "ncclCommSplit" since (2, 18, 1)
                (comm: RawComm, color: c_int, key: c_int, out: *mut RawComm,
                 config: *mut Config) -> c_int;
            comm_shrink = "ncclCommShrink" since (2, 27, 3)
                (comm: RawComm, exclude_ranks_list: *mut c_int, exclude_ranks_count: c_int,
                 out: *mut RawComm, config: *mut Config, shrink_flags: c_int) -> c_int;
            comm_get_unique_id = "ncclCommGetUniqueId" since (2, 29, 2)
                (comm: RawComm, unique_id: *mut RawUniqueId) -> c_int;
            comm_grow = "ncclCommGrow" since (2, 29, 2)
                (comm: RawComm, n_ranks: c_int, unique_id: *const RawUniqueId, rank: c_int,
                 out: *mut RawComm, config: *mut Config) -> c_int;
            comm_suspend = "ncclCommSuspend" since (2, 29, 7)
                (comm: RawComm, flags: c_int) -> c_int;
            comm_resume = "ncclCommResume" since (2, 29, 7) (comm: RawComm) -> c_int;
            comm_count = "ncclCommCount" since (2, 3, 5)
                (comm: RawComm, count: *mut c_int) -> c_int;
            comm_user_rank = "ncclCommUserRank" since (2, 3, 5)
                (comm: RawComm, rank: *mut c_int) -> c_int;
            comm_cu_device = "ncclCommCuDevice" since (2, 3, 5)
                (comm: RawComm, device: *mut c_int) -> c_int;
            comm_mem_stats = "ncclCommMemStats" since (2, 29, 7)
                (comm: RawComm, stat: c_int, value: *mut u64) -> c_int;
            comm_query_properties = "ncclCommQueryProperties" since (2, 29, 2)
                (comm: RawComm, props: *mut CommProperties) -> c_int;
            // Collectives.
            all_reduce = "ncclAllReduce" since (2, 3, 5)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
                 comm: RawComm, stream: RawStream) -> c_int;
            broadcast = "ncclBroadcast" since (2, 3, 5)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 root: c_int, comm: RawComm, stream: RawStream) -> c_int;
            reduce = "ncclReduce" since (2, 3, 5)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
                 root: c_int, comm: RawComm, stream: RawStream) -> c_int;
            all_gather = "ncclAllGather" since (2, 3, 5)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 comm: RawComm, stream: RawStream) -> c_int;
            reduce_scatter = "ncclReduceScatter" since (2, 3, 5)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
                 comm: RawComm, stream: RawStream) -> c_int;
            all_to_all = "ncclAlltoAll" since (2, 28, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 comm: RawComm, stream: RawStream) -> c_int;
            gather = "ncclGather" since (2, 28, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 root: c_int, comm: RawComm, stream: RawStream) -> c_int;
            scatter = "ncclScatter" since (2, 28, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 root: c_int, comm: RawComm, stream: RawStream) -> c_int;
            bcast = "ncclBcast" since (2, 3, 5)
                (address: *mut c_void, count: usize, data_type: c_int, root: c_int, comm: RawComm,
                 stream: RawStream) -> c_int;
            // Collectives with a configuration. They need 2.32.3, the version of `CollConfig`'s
            // layout.
            all_reduce_config = "ncclAllReduceConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
                 comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            broadcast_config = "ncclBroadcastConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 root: c_int, comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            reduce_config = "ncclReduceConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
                 root: c_int, comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            all_gather_config = "ncclAllGatherConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            reduce_scatter_config = "ncclReduceScatterConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
                 comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            all_to_all_config = "ncclAlltoAllConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            gather_config = "ncclGatherConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 root: c_int, comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            scatter_config = "ncclScatterConfig" since (2, 32, 3)
                (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int,
                 root: c_int, comm: RawComm, stream: RawStream, config: *const CollConfig) -> c_int;
            // Two-sided and one-sided operations, groups.
            send = "ncclSend" since (2, 7, 3)
                (send: *const c_void, count: usize, data_type: c_int, peer: c_int, comm: RawComm,
                 stream: RawStream) -> c_int;
            recv = "ncclRecv" since (2, 7, 3)
                (recv: *mut c_void, count: usize, data_type: c_int, peer: c_int, comm: RawComm,
                 stream: RawStream) -> c_int;
            put_signal = "ncclPutSignal" since (2, 29, 2)
                (local: *const c_void, count: usize, data_type: c_int, peer: c_int,
                 peer_win: RawWindow, peer_win_offset: usize, sig_idx: c_int, ctx: c_int,
                 flags: c_uint, comm: RawComm, stream: RawStream) -> c_int;
            signal = "ncclSignal" since (2, 29, 2)
                (peer: c_int, sig_idx: c_int, ctx: c_int, flags: c_uint, comm: RawComm,
                 stream: RawStream) -> c_int;
            wait_signal = "ncclWaitSignal" since (2, 29, 2)
                (n_desc: c_int, signal_descs: *mut RawWaitSignal, comm: RawComm,
                 stream: RawStream) -> c_int;
            group_start = "ncclGroupStart" since (2, 3, 5) () -> c_int;
            group_end = "ncclGroupEnd" since (2, 3, 5) () -> c_int;
            group_simulate_end = "ncclGroupSimulateEnd" since (2, 22, 3)
                (sim_info: *mut SimInfo) -> c_int;
            // Memory, registration, windows.
            mem_alloc = "ncclMemAlloc" since (2, 19, 1)
                (address: *mut *mut c_void, bytes: usize) -> c_int;
            mem_free = "ncclMemFree" since (2, 19, 1) (address: *mut c_void) -> c_int;
            comm_register = "ncclCommRegister" since (2, 19, 1)
                (comm: RawComm, address: *mut c_void, bytes: usize,
                 handle: *mut *mut c_void) -> c_int;
            comm_deregister = "ncclCommDeregister" since (2, 19, 1)
                (comm: RawComm, handle: *mut c_void) -> c_int;
            comm_window_register = "ncclCommWindowRegister" since (2, 27, 3)
                (comm: RawComm, address: *mut c_void, bytes: usize, win: *mut RawWindow,
                 win_flags: c_int) -> c_int;
            comm_window_deregister = "ncclCommWindowDeregister" since (2, 27, 3)
                (comm: RawComm, win: RawWindow) -> c_int;
            win_get_user_ptr = "ncclWinGetUserPtr" since (2, 29, 2)
                (comm: RawComm, win: RawWindow, out_user_ptr: *mut *mut c_void) -> c_int;
            get_lsa_device_pointer = "ncclGetLsaDevicePointer" since (2, 29, 2)
                (window: RawWindow, offset: usize, lsa_rank: c_int,
                 out_ptr: *mut *mut c_void) -> c_int;
            get_peer_device_pointer = "ncclGetPeerDevicePointer" since (2, 29, 2)
                (window: RawWindow, offset: usize, peer: c_int, out_ptr: *mut *mut c_void) -> c_int;
            get_lsa_multimem_device_pointer = "ncclGetLsaMultimemDevicePointer" since (2, 29, 2)
                (window: RawWindow, offset: usize, out_ptr: *mut *mut c_void) -> c_int;
            get_multimem_device_pointer = "ncclGetMultimemDevicePointer" since (2, 29, 2)
                (window: RawWindow, offset: usize, multimem: MultimemHandle,
                 out_ptr: *mut *mut c_void) -> c_int;
            get_multimem_device_le_info = "ncclGetMultimemDeviceLeInfo" since (2, 31, 0)
                (window: RawWindow, offset: usize, le_id: *mut u32, le_offset: *mut usize) -> c_int;
            get_cft_device_le_info = "ncclGetCftDeviceLeInfo" since (2, 31, 0)
                (window: RawWindow, offset: usize, peer_cft: c_int, cft_team: Team, le_id: *mut u32,
                 le_offset: *mut usize) -> c_int;
            get_peer_device_le_info = "ncclGetPeerDeviceLeInfo" since (2, 31, 0)
                (window: RawWindow, offset: usize, peer_world: c_int, le_id: *mut u32,
                 le_offset: *mut usize) -> c_int;
            // Reduction operators.
            red_op_create_pre_mul_sum = "ncclRedOpCreatePreMulSum" since (2, 11, 4)
                (op: *mut c_int, scalar: *mut c_void, data_type: c_int, residence: c_int,
                 comm: RawComm) -> c_int;
            red_op_destroy = "ncclRedOpDestroy" since (2, 11, 4)
                (op: c_int, comm: RawComm) -> c_int;
            // Device communicators and their resources. The functions that take a device
            // communicator need 2.32.3, the version of its layout.
            dev_comm_create = "ncclDevCommCreate" since (2, 32, 3)
                (comm: RawComm, reqs: *const Requirements, out_dev_comm: *mut DevComm) -> c_int;
            dev_comm_destroy = "ncclDevCommDestroy" since (2, 32, 3)
                (comm: RawComm, dev_comm: *const DevComm) -> c_int;
            lsa_barrier_create_requirement = "ncclLsaBarrierCreateRequirement" since (2, 28, 3)
                (team: Team, n_barriers: c_int, out_handle: *mut LsaBarrierHandle,
                 out_req: *mut ResourceRequirements) -> c_int;
            gin_barrier_create_requirement = "ncclGinBarrierCreateRequirement" since (2, 28, 7)
                (comm: RawComm, team: Team, n_barriers: c_int, out_handle: *mut GinBarrierHandle,
                 out_req: *mut ResourceRequirements) -> c_int;
            ll_a2a_calc_slots = "ncclLLA2ACalcSlots" since (2, 28, 3)
                (max_elts: c_int, max_elt_size: c_int) -> c_int;
            ll_a2a_create_requirement = "ncclLLA2ACreateRequirement" since (2, 28, 3)
                (n_blocks: c_int, n_slots: c_int, out_handle: *mut LlA2aHandle,
                 out_req: *mut ResourceRequirements) -> c_int;
            // Teams.
            team_world = "ncclTeamWorld" since (2, 28, 3) (comm: RawComm) -> Team;
            team_lsa = "ncclTeamLsa" since (2, 28, 3) (comm: RawComm) -> Team;
            team_rail = "ncclTeamRail" since (2, 28, 3) (comm: RawComm) -> Team;
            team_cft = "ncclTeamCft" since (2, 31, 0) (comm: RawComm, mode: c_int) -> Team;
            team_cft_multimem = "ncclTeamCftMultimem" since (2, 31, 0) (comm: RawComm) -> Team;
            team_rank_to_world = "ncclTeamRankToWorld" since (2, 28, 3)
                (comm: RawComm, team: Team, rank: c_int) -> c_int;
            team_rank_to_lsa = "ncclTeamRankToLsa" since (2, 28, 3)
                (comm: RawComm, team: Team, rank: c_int) -> c_int;
            // Parameters.
            param_get_all_parameter_keys = "ncclParamGetAllParameterKeys" since (2, 30, 4)
                (table: *mut *mut *const c_char, table_len: *mut c_int) -> c_int;
            param_get_parameter = "ncclParamGetParameter" since (2, 30, 4)
                (key: *const c_char, value: *mut *const c_char, value_len: *mut c_int) -> c_int;
            param_dump_all = "ncclParamDumpAll" since (2, 30, 4) () -> ();
            param_bind = "ncclParamBind" since (2, 30, 4)
                (out: *mut ParamHandle, key: *const c_char) -> c_int;
            param_get_i8 = "ncclParamGetI8" since (2, 30, 4)
                (handle: ParamHandle, out: *mut i8) -> c_int;
            param_get_i16 = "ncclParamGetI16" since (2, 30, 4)
                (handle: ParamHandle, out: *mut i16) -> c_int;
            param_get_i32 = "ncclParamGetI32" since (2, 30, 4)
                (handle: ParamHandle, out: *mut i32) -> c_int;
            param_get_i64 = "ncclParamGetI64" since (2, 30, 4)
                (handle: ParamHandle, out: *mut i64) -> c_int;
            param_get_u8 = "ncclParamGetU8" since (2, 30, 4)
                (handle: ParamHandle, out: *mut u8) -> c_int;
            param_get_u16 = "ncclParamGetU16" since (2, 30, 4)
                (handle: ParamHandle, out: *mut u16) -> c_int;
            param_get_u32 = "ncclParamGetU32" since (2, 30, 4)
                (handle: ParamHandle, out: *mut u32) -> c_int;
            param_get_u64 = "ncclParamGetU64" since (2, 30, 4)
                (handle: ParamHandle, out: *mut u64) -> c_int;
            param_get_str = "ncclParamGetStr" since (2, 30, 4)
                (handle: ParamHandle, out: *mut *const c_char) -> c_int;
            param_get = "ncclParamGet" since (2, 30, 4)
                (handle: ParamHandle, out: *mut c_void, max_len: c_int, len: *mut c_int) -> c_int;
        }
    };
}

/// Declares the function table.
macro_rules! table {
    ($( $name:ident = $symbol:literal since $since:tt
        ($($arg:ident: $type:ty),* $(,)?) -> $ret:ty; )*) => {
        /// The function table: `None` for functions that the library lacks.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Functions {
            $(
                #[doc = concat!("NCCL: `", $symbol, "`.")]
                pub $name: Option<unsafe extern "C" fn($($type),*) -> $ret>,
            )*
        }

        impl Functions {
            /// A table without functions.
            pub const NONE: Self = Self { $( $name: None, )* };

            /// Returns the functions of a library, looked up by `symbol`; NULL for none.
            ///
            /// # Safety
            ///
            /// `symbol` returns NULL or NCCL's function of that name, which stays loaded.
            pub unsafe fn load(symbol: impl Fn(&str) -> *mut c_void) -> Self {
                // SAFETY: NULL is `None`; anything else is a function with this prototype, by the
                // caller's contract.
                Self { $( $name: unsafe {
                    std::mem::transmute::<
                        *mut c_void,
                        Option<unsafe extern "C" fn($($type),*) -> $ret>,
                    >(symbol($symbol))
                }, )* }
            }

            /// Returns the symbols of the missing functions.
            #[must_use]
            pub fn missing(&self) -> Vec<&'static str> {
                let all = [$( (self.$name.is_none(), $symbol) ),*];
                all.into_iter().filter(|(missing, _)| *missing).map(|(_, symbol)| symbol).collect()
            }
        }

        /// Symbol, argument types and return type of each function, as the list above has them; the
        /// host crate's tests compare them with NCCL's headers.
        pub const PROTOTYPES: &[(&str, &[&str], &str)] =
            &[$(($symbol, &[$(stringify!($type)),*], stringify!($ret))),*];
    };
}
nccl_functions!(table);
