/*
 * The split dispatch of paper section 5 beside D's low-latency exchange, with just enough of a device to get stuck on.
 * Written from the paper, so that it can disagree with the kernel; README.md beside this file says what is modelled.
 *
 * A rank is two host tasks (Engine: rounds, rendezvous, D launches, permits, activations; Prefill: P's host enqueue), P's
 * buffer, D's buffer, and a device with a stream for each phase. Every kernel of an exchange waits, resident, for the
 * same one of all ranks. P's segment ends behind a notification, and its boundary is published when the counts are there.
 */

/* Sizes. */
#ifndef N
#define N 2             /* ranks */
#endif
#ifndef M
#define M 2             /* rounds with decode */
#endif
#ifndef E
#define E 2             /* P epochs */
#endif
#ifndef L
#define L 2             /* layers: an epoch has the boundary 0, and one behind each notification */
#endif
#ifndef K
#define K 1             /* span: segments that a permit grants */
#endif
#ifndef CAP
#define CAP 2           /* exchange kernels that fit on a device: 1 or 2 */
#endif
#ifndef COOP
#define COOP 0          /* 1: a task runs undisturbed between two awaits; 0: anything may come between statements */
#endif

/* The protocol, and its mutants. "One rank" is always the last one, BAD. */
#ifndef PASS
#define PASS 0          /* 1: P goes past its permit by one boundary */
#endif
#ifndef COUNTED
#define COUNTED 1       /* 0: P does not wait for its counts before the boundary */
#endif
#ifndef AGAIN
#define AGAIN 0         /* a second dispatch while one is pending: 1 of P, notified of again, 2 of D */
#endif
#ifndef GIVE
#define GIVE 0          /* the first epoch's last dispatch is abandoned behind its notification, and the epoch ends there,
                           1: on all ranks, 2: on one rank; 3: its first one is, and the epoch goes on */
#endif
#ifndef QUIET
#define QUIET 1         /* a retired buffer is taken back when the next epoch is activated; 0: never */
#endif

/* What is checked besides deadlock. */
#ifndef RULES
#define RULES 1         /* data within the permit, behind counts, on a buffer that is neither pending nor retired */
#endif

#define BAD         (N - 1)
#define BIT(r)      (1 << (r))
#define ALL         (BIT(N) - 1)

#if RULES
#define RULE(c)     assert(c)
#else
#define RULE(c)     skip
#endif

/* ---------------------------------------------------------------- device */

#define P_STREAM(r) (2 * (r))
#define D_STREAM(r) (2 * (r) + 1)
#define OTHER(x)    ((x) ^ 1)

#define NOTIFY      0                           /* a kernel: what it does, in which layer, of which epoch */
#define DISPATCH    1
#define COMBINE     2
#define CALL(what)  ((what) + 4 * layer + 16 * epoch[r])

#define OUTSIDE     0                           /* the head of a stream has not come to the device yet */
#define WAITING     1                           /* it has, and there is no room */
#define RESIDENT    2

chan queue[2 * N] = [8] of { byte };            /* streams; a kernel leaves when it has finished */
byte room[2 * N];                               /* of their heads */
byte inside[2];                                 /* ranks on which a kernel of P, of D is resident */
byte p_open[N], d_open[N];                      /* enqueued and unfinished */
bit counted[N];                                 /* the counts of P's newest notification are there */
byte head, first, j;                            /* scratch, 0 between uses */

inline enter(x)
{
    room[x] = RESIDENT;
    inside[(x) & 1] = inside[(x) & 1] | BIT((x) / 2)
}

inline arrive(x)
{
    if
    :: CAP == 1 && room[OTHER(x)] != OUTSIDE -> room[x] = WAITING
    :: else -> enter(x)
    fi
}

/* Heads come in any order where they compete for room; where they do not, at once. */
inline leave(x)
{
    queue[x] ? _;
    room[x] = OUTSIDE;
    if
    :: room[OTHER(x)] == WAITING -> enter(OTHER(x))
    :: else
    fi;
#if CAP > 1
    if
    :: len(queue[x]) > 0 -> arrive(x)
    :: else
    fi
#endif
}

#if CAP == 1
proctype Device(byte x)
{
end:
    do
    :: d_step { len(queue[x]) > 0 && room[x] == OUTSIDE -> arrive(x) }
    od
}
#endif

inline enqueue(x, kernel, unfinished)
{
    d_step {
        queue[x] ! kernel;
        unfinished++;
#if CAP > 1
        if
        :: len(queue[x]) == 1 -> arrive(x)
        :: else
        fi
#endif
    }
}

/* A kernel of a phase finishes when it is resident on all ranks. */
proctype Meet(byte phase)
{
    bit same_call = 1;
end:
    do
    :: d_step { inside[phase] == ALL ->
            inside[phase] = 0;
            queue[phase] ? <first>;
            j = 0;
            do
            :: j < N ->
                queue[2 * j + phase] ? <head>;
                same_call = (head == first);
                assert(same_call);
                leave(2 * j + phase);
                if
                :: phase == 0 && (head & 3) == NOTIFY -> counted[j] = 1
                :: else
                fi;
                if
                :: phase == 0 -> p_open[j]--
                :: else -> d_open[j]--
                fi;
                j++
            :: else -> break
            od;
            head = 0; first = 0; j = 0
       }
    od
}

/* ---------------------------------------------------------------- host: state */

#define IDLE        0                           /* of P's buffer */
#define NOTIFIED    1
#define SUBMITTED   2
#define RETIRED     3

byte buffer[N];
bit d_pending[N];                               /* of D's: dispatched, not combined */
byte epoch[N];
byte at[N];                                     /* boundary k is published as k + 1; 0: P has not come to boundary 0 */
byte permit[N];
bit open[N], going[N], done[N];

#define BOUNDS      (L + 1)
#define STANDS(r)   (done[r] && p_open[r] == 0 || !done[r] && at[r] > permit[r])

#if COOP
#define STEP        atomic
#else
#define STEP
#endif

/* ---------------------------------------------------------------- host: the shared plan, and rendezvous */

byte decodes = M, epochs = E;                   /* left to plan */
chan plan[N] = [2] of { byte };
#define ENTRY       (work + 2 * start)
#define NO          0
#define FIRST       1                           /* the epoch opens before this round's D: p = 0 */
#define AFTER       2                           /* it opens after D has been enqueued: p = K */

byte came[2];
#define PRE_D       0
#define POST_D      1
#define GONE(tag)   (!(came[tag] & BIT(r)))

inline come(tag)
{
    d_step {
        came[tag] = came[tag] | BIT(r);
        if
        :: came[tag] == ALL -> came[tag] = 0
        :: else
        fi
    }
}

/* Whoever begins a round first chooses for all: whether D decodes in it, and when an epoch opens. */
inline choose()
{
    if
    :: decodes > 0 -> work = 1
    :: open[r] || epochs > 0 -> work = 0
    fi;
    if
    :: !open[r] && epochs > 0 -> start = FIRST
    :: !open[r] && epochs > 0 && work -> start = AFTER
    :: work || open[r] -> start = NO
    fi;
    decodes = decodes - work;
    epochs = epochs - (start != NO);
    i = 0;
    do
    :: i < N -> plan[i] ! ENTRY; i++
    :: else -> i = 0; break
    od
}

/* ---------------------------------------------------------------- host: tasks */

inline activate(p)
{
    drained = (p_open[r] == 0);
    if
    :: QUIET && buffer[r] == RETIRED -> RULE(drained); buffer[r] = IDLE
    :: else
    fi;
    epoch[r]++; at[r] = 0; permit[r] = p; done[r] = 0; open[r] = 1; going[r] = 1
}

inline launch()
{
    if
    :: work ->
        not_pending = !d_pending[r];
        RULE(not_pending);
        d_pending[r] = 1;
        enqueue(D_STREAM(r), DISPATCH, d_open[r]);
#if AGAIN == 2
        not_pending = !d_pending[r];
        RULE(not_pending);
        enqueue(D_STREAM(r), DISPATCH, d_open[r]);
#endif
        enqueue(D_STREAM(r), COMBINE, d_open[r]);
        d_pending[r] = 0
    :: else
    fi
}

/* The next permit, or the end of the epoch: P was complete when this round stopped it. */
inline release()
{
    if
    :: complete -> open[r] = 0; at[r] = 0; permit[r] = 0; done[r] = 0
    :: !complete && permit[r] < BOUNDS -> permit[r] = permit[r] + K
    :: else
    fi
}

#define OVER        (len(plan[r]) == 0 && decodes == 0 && epochs == 0 && !open[r])

proctype Engine(byte r)
{
    byte start, entry, i;
    bit work, complete, drained = 1, not_pending = 1;

    do
    :: OVER -> break
    :: atomic { !OVER && d_open[r] == 0 ->
            if
            :: len(plan[r]) == 0 -> choose()
            :: else
            fi;
            plan[r] ? entry;
            work = entry & 1; start = entry >> 1; entry = 0;
            if
            :: start == FIRST -> activate(0)
            :: else
            fi
       };
       if
       :: open[r] ->
            STEP { STANDS(r); complete = done[r]; come(PRE_D) };
            STEP { GONE(PRE_D); launch(); come(POST_D) };
            STEP { GONE(POST_D); release() }
       :: else ->
            STEP { launch(); come(POST_D) };
            STEP { GONE(POST_D);
                   if
                   :: start == AFTER -> activate(K)
                   :: else
                   fi }
       fi;
       d_step { work = 0; start = 0; complete = 0; drained = 1 }
    od;
    p_open[r] == 0 && d_open[r] == 0 && !going[r]
}

#define PERMITTED   (at[r] <= permit[r] + PASS)
#define GIVES(k)    (epoch[r] == 1 && ((GIVE == 1 || GIVE == 2 && r == BAD) && (k) == L || GIVE == 3 && (k) == 1))

inline notify()
{
    not_retired = (buffer[r] != RETIRED);
    RULE(not_retired);
    not_pending = (buffer[r] == IDLE || buffer[r] == RETIRED);
    RULE(not_pending);
    buffer[r] = NOTIFIED;
    counted[r] = 0;
    enqueue(P_STREAM(r), CALL(NOTIFY), p_open[r])
}

inline submit()
{
    within_permit = (at[r] <= permit[r]);
    RULE(within_permit);
    behind_counts = counted[r];
    RULE(behind_counts);
    not_retired = (buffer[r] == NOTIFIED);
    RULE(not_retired);
    buffer[r] = SUBMITTED;
    enqueue(P_STREAM(r), CALL(DISPATCH), p_open[r]);
    enqueue(P_STREAM(r), CALL(COMBINE), p_open[r]);
    buffer[r] = IDLE
}

/* P's segment from boundary k: the data that was notified of, and the next notification. */
proctype Prefill(byte r)
{
    byte layer;
    bit within_permit = 1, behind_counts = 1, not_retired = 1, not_pending = 1, ends;

end:
    do
    :: STEP { going[r] && at[r] == 0 -> at[r] = 1 }
    :: STEP { going[r] && at[r] > 0 && PERMITTED ->
            ends = (at[r] == BOUNDS);
            if
            :: at[r] > 1 && GIVES(at[r] - 1) ->
                buffer[r] = RETIRED
            :: at[r] > 1 && !GIVES(at[r] - 1) -> layer = at[r] - 2; submit()
            :: else
            fi;
            if
            :: ends -> layer = 0; going[r] = 0; done[r] = 1
            :: else ->
                layer = at[r] - 1;
                notify();
#if AGAIN == 1
                notify();
#endif
            fi
       };
       if
       :: ends -> ends = 0
       :: else -> STEP { (counted[r] || !COUNTED) -> layer = 0; at[r]++ }
       fi
    od
}

init
{
    byte r = 0;
    atomic {
        do
        :: r < N -> run Engine(r);
            run Prefill(r);
#if CAP == 1
            run Device(P_STREAM(r));
            run Device(D_STREAM(r));
#endif
            r++
        :: else -> break
        od;
        run Meet(0);
        run Meet(1)
    }
}
