//! The function table: which simulator function implements which of NCCL's.

use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use nccl_device::raw::host::NcclDevice;

use super::checks::CHECKS;
use super::gin::{barrier, hybrid, post, shadow, wait};
use super::{coop, gin, lsa_barrier, pointers, reduce_copy, teams};
use crate::gpu::waits::WAITS;

/// Installs the table for this process.
pub(crate) fn install() {
    nccl_device::raw::host::install(&TABLE);
}

/// Declares the table: single functions, then families with one function per element type.
macro_rules! table {
    (
        functions { $( $single:ident: $function:expr, )* }
        families { $( $family:ident: $($member:ident),*; )* }
    ) => {
        static TABLE: NcclDevice = NcclDevice {
            $( $single: $function, )*
            $($( $member: reduce_copy::$family, )*)*
            waits: WAITS,
            checks: CHECKS,
        };
    };
}

table! {
    functions {
        ncclTeamRankIsMember: teams::rank_is_member,
        ncclTeamRankToTeam: teams::rank_to_team,
        ncclTeamRankToWorld: teams::rank_to_world,
        ncclTeamRankToLsa: teams::rank_to_lsa,
        ncclTeamRankInDifference: teams::rank_in_difference,
        ncclGetLocalPointer: pointers::local,
        ncclGetLsaPointer: pointers::lsa,
        ncclGetPeerPointer: pointers::peer,
        ncclGetPeerPointerTeam: pointers::peer_of_team,
        ncclGetMultimemPointer: pointers::multimem,
        ncclGetLsaMultimemPointer: pointers::lsa_multimem,
        ncclGetCftLeInfo: pointers::cft_le_info,
        ncclGetPeerLeInfo: pointers::peer_le_info,
        ncclGetMultimemLeInfo: pointers::multimem_le_info,
        ncclGetResourceBufferOffset: pointers::resource_offset,
        ncclGetResourceBufferLocalPointer: pointers::resource_local,
        ncclGetResourceBufferLsaPointer: pointers::resource_lsa,
        ncclGetResourceBufferPeerPointer: pointers::resource_peer,
        ncclGetResourceBufferMultimemPointer: pointers::resource_multimem,
        ncclGetResourceBufferLsaMultimemPointer: pointers::resource_lsa_multimem,
        ncclGetResourceBufferCftLeInfo: pointers::resource_le_info,
        ncclGetResourceBufferPeerLeInfo: pointers::resource_le_info,
        ncclGetResourceBufferMultimemLeInfo: pointers::resource_multimem_le_info,
        ncclDevComm_Rank: teams::comm_rank,
        ncclDevComm_NRanks: teams::comm_n_ranks,
        ncclDevComm_LsaRank: teams::comm_lsa_rank,
        ncclDevComm_LsaSize: teams::comm_lsa_size,
        ncclCoopAnyInitThread: coop::thread,
        ncclCoopAnyInitWarp: coop::warp,
        ncclCoopAnyInitLanes: coop::lanes,
        ncclCoopAnyInitWarpSpan: coop::warp_span,
        ncclCoopAnyInitCta: coop::cta,
        ncclCoopThreadRank: coop::thread_rank,
        ncclCoopSize: coop::size,
        ncclCoopNumThreads: coop::size,
        ncclCoopSync: coop::sync,
        ncclLsaBarrierSession_C_size: lsa_barrier::size,
        ncclLsaBarrierSessionInit: lsa_barrier::init,
        ncclLsaBarrierSessionArrive: lsa_barrier::arrive,
        ncclLsaBarrierSessionWait: lsa_barrier::wait,
        ncclLsaBarrierSessionSync: lsa_barrier::sync,
        ncclLsaBarrierSessionDestroy: lsa_barrier::destroy,
        ncclGin_C_init: gin::init,
        ncclGin_C_initWithResourceSharingMode: gin::init_with_sharing,
        ncclGinPut: post::put,
        ncclGinPut_v2: post::put_v2,
        ncclGinPut_v3: post::put_v3,
        ncclGinPutValue: post::put_value,
        ncclGinPutValue_v2: post::put_value_v2,
        ncclGinPutValue_v3: post::put_value_v3,
        ncclGinGet: post::get,
        ncclGinGet_v2: post::get_v2,
        ncclGinSignal: post::signal,
        ncclGinSignal_v2: post::signal_v2,
        ncclGinSignal_v3: post::signal_v3,
        ncclGinFlush: wait::flush,
        ncclGinFlush_v2: wait::flush_v2,
        ncclGinFlushTimeout: wait::flush_timeout,
        ncclGinFlushAsync: wait::flush_async,
        ncclGinWait: wait::wait,
        ncclGinWaitTimeout: wait::wait_timeout,
        ncclGinReadCounter: wait::read_counter,
        ncclGinWaitCounter: wait::wait_counter,
        ncclGinWaitCounterTimeout: wait::wait_counter_timeout,
        ncclGinResetCounter: wait::reset_counter,
        ncclGinReadSignal: wait::read_signal,
        ncclGinReadSignalVA: wait::read_signal_va,
        ncclGinWaitSignal: wait::wait_signal,
        ncclGinWaitSignalTimeout: wait::wait_signal_timeout,
        ncclGinWaitSignalVA: wait::wait_signal_va,
        ncclGinWaitSignalTimeoutVA: wait::wait_signal_timeout_va,
        ncclGinWaitSignalMeetShadow: shadow::wait_meet,
        ncclGinWaitSignalFollowShadow: shadow::wait_follow,
        ncclGinGetSignalShadowPtr: shadow::pointer,
        ncclGinIncreaseSignalShadow: shadow::increase,
        ncclGinResetSignal: shadow::reset_signal,
        ncclGinResetSignalVA: wait::reset_signal_va,
        ncclGinBarrierSession_C_size: barrier::size,
        ncclGinBarrierSessionInit: barrier::init,
        ncclGinBarrierSessionInitAllContexts: barrier::init_all_contexts,
        ncclGinBarrierSessionSync: barrier::sync,
        ncclGinBarrierSessionDestroy: barrier::destroy,
        ncclBarrierSession_C_size: hybrid::size,
        ncclBarrierSessionInit: hybrid::init,
        ncclBarrierSessionSync: hybrid::sync,
        ncclBarrierSessionDestroy: hybrid::destroy,
        // No parameter has the element type, so it cannot be inferred.
        ncclLsaReduceSumCopy_I8: reduce_copy::lsa_reduce_sum_copy::<i8>,
        ncclLsaReduceSumCopy_U8: reduce_copy::lsa_reduce_sum_copy::<u8>,
        ncclLsaReduceSumCopy_I32: reduce_copy::lsa_reduce_sum_copy::<i32>,
        ncclLsaReduceSumCopy_U32: reduce_copy::lsa_reduce_sum_copy::<u32>,
        ncclLsaReduceSumCopy_I64: reduce_copy::lsa_reduce_sum_copy::<i64>,
        ncclLsaReduceSumCopy_U64: reduce_copy::lsa_reduce_sum_copy::<u64>,
        ncclLsaReduceSumCopy_F16: reduce_copy::lsa_reduce_sum_copy::<f16>,
        ncclLsaReduceSumCopy_F32: reduce_copy::lsa_reduce_sum_copy::<f32>,
        ncclLsaReduceSumCopy_F64: reduce_copy::lsa_reduce_sum_copy::<f64>,
        ncclLsaReduceSumCopy_BF16: reduce_copy::lsa_reduce_sum_copy::<bf16>,
        ncclLsaReduceSumCopy_F8E4M3: reduce_copy::lsa_reduce_sum_copy::<F8E4M3>,
        ncclLsaReduceSumCopy_F8E5M2: reduce_copy::lsa_reduce_sum_copy::<F8E5M2>,
    }
    families {
        lsa_reduce_sum:
            ncclLsaReduceSum_I8, ncclLsaReduceSum_U8, ncclLsaReduceSum_I32, ncclLsaReduceSum_U32,
            ncclLsaReduceSum_I64, ncclLsaReduceSum_U64, ncclLsaReduceSum_F16, ncclLsaReduceSum_F32,
            ncclLsaReduceSum_F64, ncclLsaReduceSum_BF16, ncclLsaReduceSum_F8E4M3,
            ncclLsaReduceSum_F8E5M2;
        lsa_copy:
            ncclLsaCopy_I8, ncclLsaCopy_U8, ncclLsaCopy_I32, ncclLsaCopy_U32, ncclLsaCopy_I64,
            ncclLsaCopy_U64, ncclLsaCopy_F16, ncclLsaCopy_F32, ncclLsaCopy_F64, ncclLsaCopy_BF16,
            ncclLsaCopy_F8E4M3, ncclLsaCopy_F8E5M2;
        multimem_reduce_sum:
            ncclMultimemReduceSum_I32, ncclMultimemReduceSum_U32, ncclMultimemReduceSum_I64,
            ncclMultimemReduceSum_U64, ncclMultimemReduceSum_F16, ncclMultimemReduceSum_F32,
            ncclMultimemReduceSum_F64, ncclMultimemReduceSum_BF16, ncclMultimemReduceSum_F8E4M3,
            ncclMultimemReduceSum_F8E5M2;
        multimem_copy:
            ncclMultimemCopy_I32, ncclMultimemCopy_U32, ncclMultimemCopy_I64, ncclMultimemCopy_U64,
            ncclMultimemCopy_F16, ncclMultimemCopy_F32, ncclMultimemCopy_F64, ncclMultimemCopy_BF16,
            ncclMultimemCopy_F8E4M3, ncclMultimemCopy_F8E5M2;
        multimem_reduce_sum_copy:
            ncclMultimemReduceSumCopy_I32, ncclMultimemReduceSumCopy_U32,
            ncclMultimemReduceSumCopy_I64, ncclMultimemReduceSumCopy_U64,
            ncclMultimemReduceSumCopy_F16, ncclMultimemReduceSumCopy_F32,
            ncclMultimemReduceSumCopy_F64, ncclMultimemReduceSumCopy_BF16,
            ncclMultimemReduceSumCopy_F8E4M3, ncclMultimemReduceSumCopy_F8E5M2;
        local_reduce_sum_copy:
            ncclLocalReduceSumCopy_I8, ncclLocalReduceSumCopy_U8, ncclLocalReduceSumCopy_I32,
            ncclLocalReduceSumCopy_U32, ncclLocalReduceSumCopy_I64, ncclLocalReduceSumCopy_U64,
            ncclLocalReduceSumCopy_F16, ncclLocalReduceSumCopy_F32, ncclLocalReduceSumCopy_F64,
            ncclLocalReduceSumCopy_BF16, ncclLocalReduceSumCopy_F8E4M3,
            ncclLocalReduceSumCopy_F8E5M2;
    }
}
