/*
 * The turnstile of paper section 4, with just enough of a device to get stuck on. Written from the paper alone, so that
 * it can disagree with the kernel; README.md beside this file says what is modelled and how a variant is chosen.
 *
 * A rank is two host tasks (Engine: rounds, rendezvous, D launches, permits; Prefill: P's host enqueue) and a device
 * with two streams: D's launch stream and P's background stream. Only communication kernels are modelled, one for each
 * P boundary interval and one for each D iteration: the conflicting pair.
 */

/* Sizes. */
#ifndef N
#define N 2             /* ranks: 2, 3 or 4 */
#endif
#ifndef M
#define M 3             /* rounds with decode */
#endif
#ifndef E
#define E 1             /* P epochs */
#endif
#ifndef S
#define S 2             /* boundary intervals of an epoch */
#endif
#ifndef K
#define K 1             /* span: intervals that a permit grants */
#endif
#ifndef Q
#define Q 8             /* kernels that a stream holds before an enqueue blocks the host */
#endif
#ifndef CAP
#define CAP 1           /* communication kernels that fit on a device: 1 or 2 */
#endif
#ifndef LAG
#define LAG 1           /* a round begins with fewer than LAG unfinished D on its rank; 0: no such wait */
#endif
#ifndef COOP
#define COOP 0          /* 1: asyncio, a task runs undisturbed between awaits; 0: anything may come between statements */
#endif
#ifndef PROMPT
#define PROMPT 0        /* 1: heads of streams come to the device at once, which commutes with all else where they
                           never compete for room: with a single stream, or with room for both */
#endif

/* The protocol, and its mutants. "One rank" is always the last one, BAD. */
#ifndef TURN
#define TURN 1          /* 0: no turnstile, P and D enter as they are ready */
#endif
#ifndef ROUTE
#define ROUTE 1         /* P's all-reduce is on D's launch stream: 0 nowhere, 1 on all ranks, 2 on rank 0 only */
#endif
#ifndef PRE
#define PRE 1           /* pre-d: 0 dropped on all ranks, 1 made, 2 skipped by one rank */
#endif
#ifndef POST
#define POST 1          /* post-d, likewise */
#endif
#ifndef EVERY
#define EVERY 0         /* 1: rounds without P end with the post-d exchange too */
#endif
#ifndef SWAP
#define SWAP 0          /* 1: one rank makes post-d first and pre-d second */
#endif
#ifndef NAMED
#define NAMED 1         /* rendezvous match by 1: name, 0: order of the calls (the name is then in the digest) */
#endif
#ifndef DIGEST
#define DIGEST 0        /* rendezvous compare the plan; a difference 1: stops all ranks, 2: is an error to be found */
#endif
#ifndef IDLE
#define IDLE 0          /* one rank, when it has no D in a P round, skips 1: both rendezvous, 2: the whole turn */
#endif
#ifndef REACHED
#define REACHED 1       /* P's endpoint is awaited 1: before pre-d, 2: between pre-d and the launch, 3: after the launch */
#endif
#ifndef PERMIT
#define PERMIT 0        /* release 0: after post-d, 1: before post-d, 2: before the launch, 3: so, and an await between */
#endif
#ifndef PLAN
#define PLAN 0          /* seen by each rank in its own time, not shared: 1 ready D, 2 a new epoch */
#endif
#ifndef FIN
#define FIN 0           /* P complete: 0 host enqueue, read once while P is stopped; 1 so, but read again after the permit;
                           2 device, each rank for itself; 3 device, agreed in post-d */
#endif
#ifndef AGAIN
#define AGAIN 0         /* an activation reaches one rank a second time: 1 while its epoch is open, 2 after it closed */
#endif
#ifndef ACCEPT
#define ACCEPT 0        /* 1: and is not rejected */
#endif
#ifndef PASS
#define PASS 0          /* P ignores its permit 1: on one rank, 2: everywhere */
#endif
#ifndef S_BAD
#define S_BAD S         /* boundary intervals on one rank */
#endif
#ifndef K_BAD
#define K_BAD K         /* span on one rank */
#endif
#ifndef PFIRST
#define PFIRST 0        /* 1: strict P priority, no D while P has work */
#endif
#ifndef FORGET
#define FORGET 0        /* 1: no permit in a round without D */
#endif

/* What is checked besides deadlock. */
#ifndef ORDER
#define ORDER 1         /* a D iteration enters after the same number of P calls on each of its ranks */
#endif
#ifndef RULES
#define RULES 1         /* P stays within its permit; members of a P collective agree which one it is */
#endif
#ifndef LIVE
#define LIVE 0          /* endless D and epochs: 1 D is always ready and decodes for ever, 2 every epoch closes */
#endif

#define BAD         (N - 1)
#define BIT(r)      (1 << (r))
#define ALL         (BIT(N) - 1)
#define BOUNDS(r)   ((r) == BAD -> S_BAD : S)
#define SPAN(r)     ((r) == BAD -> K_BAD : K)

#if N == 4
#define GROUP(r)    ((r) & 1)                   /* D over {0,2} and {1,3}: ATP2/ADP2 */
#define MEMBERS(g)  ((g) -> 10 : 5)
#define GROUPS      2
#else
#define GROUP(r)    0
#define MEMBERS(g)  ALL
#define GROUPS      1
#endif

#define LAUNCH(r)   (2 * (r))                   /* D's launch stream */
#define OTHER(x)    ((x) ^ 1)                   /* its rank's other stream */
#if ROUTE == 0
#define P_STREAM(r) (LAUNCH(r) + 1)
#elif ROUTE == 1
#define P_STREAM(r) LAUNCH(r)
#else
#define P_STREAM(r) (LAUNCH(r) + ((r) != 0))
#endif

/* ---------------------------------------------------------------- device */

#define D        0                              /* a kernel is D, or P's: its boundary, counted from 1, and its epoch */
#define CALL(r)  (at[r] + 16 * epoch[r])

#define OUTSIDE  0                              /* the head of a stream has not come to the device yet */
#define WAITING  1                              /* it has, and there is no room */
#define RESIDENT 2

chan queue[2 * N] = [Q] of { byte };            /* streams; a kernel leaves when it has finished */
byte room[2 * N];                               /* of their heads */
byte p_in, d_in;                                /* ranks on which a P or D kernel is resident */
byte d_open[N];                                 /* D launched and unfinished */
byte p_open[N];                                 /* the same for P, where it matters */
bit tick;                                       /* turns when a D of group 0 finishes */
bit diverged;                                   /* a rendezvous found the ranks' plans to differ */
byte head, first, j;                            /* scratch, 0 between uses */

inline enter(x)
{
    room[x] = RESIDENT;
    if
    :: queue[x] ? [D] -> d_in = d_in | BIT((x) / 2)
    :: else      -> p_in = p_in | BIT((x) / 2)
    fi
}

/* Heads come in any order; room is granted in the order in which they came. Two streams, so at most one head waits. */
inline arrive(x)
{
    if
    :: CAP == 1 && room[OTHER(x)] != OUTSIDE -> room[x] = WAITING
    :: else -> enter(x)
    fi
}

inline leave(x)
{
    queue[x] ? _;
    room[x] = OUTSIDE;
    if
    :: room[OTHER(x)] == WAITING -> enter(OTHER(x))
    :: else
    fi;
#if PROMPT
    if
    :: len(queue[x]) > 0 -> arrive(x)
    :: else
    fi
#endif
}

#if !PROMPT
proctype Device(byte r)
{
end:
    do
    :: d_step { len(queue[LAUNCH(r)]) > 0 && room[LAUNCH(r)] == OUTSIDE -> arrive(LAUNCH(r)) }
#if ROUTE != 1
    :: d_step { len(queue[LAUNCH(r) + 1]) > 0 && room[LAUNCH(r) + 1] == OUTSIDE -> arrive(LAUNCH(r) + 1) }
#endif
    od
}
#endif

/* P's full-TP all-reduce finishes when it is resident on all ranks. */
proctype AllReduce()
{
    bit same_call = 1;
end:
    do
    :: d_step { p_in == ALL ->
            p_in = 0;
            queue[P_STREAM(0)] ? <first>;
            j = 0;
            do
            :: j < N ->
                queue[P_STREAM(j)] ? <head>;
                same_call = (head == first);
#if RULES
                assert(same_call);
#endif
                leave(P_STREAM(j));
#if FIN >= 2
                p_open[j]--;
#endif
                j++
            :: else -> break
            od;
            same_call = 1; head = 0; first = 0; j = 0
       }
    od
}

/* D's collective, when it is resident on the ranks of its group. */
proctype Gather(byte g)
{
end:
    do
    :: d_step { (d_in & MEMBERS(g)) == MEMBERS(g) ->
            d_in = d_in & ~MEMBERS(g);
            j = 0;
            do
            :: j < N && (MEMBERS(g) & BIT(j)) -> leave(LAUNCH(j)); d_open[j]--; j++
            :: j < N && !(MEMBERS(g) & BIT(j)) -> j++
            :: else -> break
            od;
            j = 0;
#if LIVE
            if
            :: g == 0 -> tick = 1 - tick
            :: else
            fi
#endif
       }
#if DIGEST == 1
    :: diverged -> skip                         /* a run that stops with an error is not a hang */
#endif
    od
}

/* ---------------------------------------------------------------- host: state */

/* The turnstile of each rank. Boundary i is published as at = i + 1; P stands at its endpoint p when at = p + 1. */
byte epoch[N];                                  /* newest epoch */
byte at[N];                                     /* r + 1 */
byte permit[N];                                 /* p */
bit open[N];                                    /* an epoch is open */
bit going[N];                                   /* P's host enqueue is under way ... */
bit done[N];                                    /* ... or has ended */

#define STANDS(r)  (done[r] || at[r] > permit[r])

/* One task of a rank that is held up by a full stream holds up the rank's loop. */
bit blocked[N];

#if COOP
#define STEP       atomic
#define FREE(r)    (!blocked[r] && !diverged)
#else
#define STEP
#define FREE(r)    (!diverged)
#endif
#define AWAIT(r, c) (FREE(r) && (c))

#if ORDER
byte d_count[N], p_count[N];                    /* launched, of each kind; D modulo M */
byte p_before[GROUPS * M];                      /* P calls before a D iteration that is not on all its ranks yet ... */
byte launched[GROUPS * M];                      /* ... and those on which it is */
#define NTH(r)     (GROUP(r) * M + d_count[r])
#endif

inline enqueue(x, kernel)
{
#if COOP
    if
    :: len(queue[x]) == Q -> blocked[r] = 1; len(queue[x]) < Q; blocked[r] = 0
    :: else
    fi;
#endif
    atomic {
        queue[x] ! kernel;
#if PROMPT
        d_step {
            if
            :: len(queue[x]) == 1 -> arrive(x)
            :: else
            fi
        };
#endif
#if ORDER
        if
        :: kernel == D ->
            same_order = (launched[NTH(r)] == 0 || p_before[NTH(r)] == p_count[r]);
            assert(same_order);
            p_before[NTH(r)] = p_count[r];
            launched[NTH(r)] = launched[NTH(r)] | BIT(r);
            if
            :: launched[NTH(r)] == MEMBERS(GROUP(r)) -> launched[NTH(r)] = 0; p_before[NTH(r)] = 0
            :: else
            fi;
            d_count[r] = (d_count[r] + 1) % M
        :: else -> p_count[r]++
        fi;
#endif
        if
        :: kernel == D -> d_open[r]++
        :: else -> p_open[r] = p_open[r] + (FIN >= 2)
        fi
    }
}

/* ---------------------------------------------------------------- host: rendezvous */

#define PRE_D      0
#define POST_D     1
#define SLOT(tag)  (NAMED -> (tag) : 0)

byte came[2];                                   /* ranks that are there; the last one to come lets all go */
byte said[2];                                   /* digest of the first to come */
bit differ[2];
bit working, all_complete;                      /* FIN 3: somebody's P has not finished; what post-d said of it */

inline come(tag, makes, digest, complete)
{
    atomic {
        if
        :: makes ->
#if DIGEST
            if
            :: came[SLOT(tag)] == 0 -> said[SLOT(tag)] = digest
            :: else -> differ[SLOT(tag)] = differ[SLOT(tag)] || said[SLOT(tag)] != digest
            fi;
#endif
#if FIN == 3
            working = working || ((tag) == POST_D && !(complete));
#endif
            came[SLOT(tag)] = came[SLOT(tag)] | BIT(r);
            if
            :: came[SLOT(tag)] == ALL ->
                came[SLOT(tag)] = 0;
#if DIGEST
                said[SLOT(tag)] = 0;
                diverged = differ[SLOT(tag)];
#endif
#if DIGEST == 2
                assert(!diverged);
#endif
#if FIN == 3
                if
                :: (tag) == POST_D -> all_complete = !working; working = 0
                :: else
                fi
#endif
            :: else
            fi
        :: else
        fi
    }
}

#define GONE(tag)  (!(came[SLOT(tag)] & BIT(r)))  /* also where the rank did not come */

/* ---------------------------------------------------------------- host: the plan */

#define NO         0
#define FIRST      1                            /* the epoch opens before this round's D: p = 0 */
#define AFTER      2                            /* it opens after D has been enqueued: p = K */

byte decodes = M, epochs = E;                   /* left to plan */
#define AHEAD      8                            /* rounds by which a rank may be ahead of another */
chan plan[N] = [AHEAD] of { byte };             /* rounds that a rank has not begun */
#define ENTRY      (work + 4 * start + 16 * number)
byte owed[N];                                   /* PLAN 1: D that this rank has not noticed yet */
byte due[N];                                    /* PLAN 2: the epoch that it has not noticed yet */

#define MORE_D     (decodes > 0 && !(PFIRST && (open[r] || epochs > 0)))
#define MORE_P     (epochs > 0 && !open[r] && due[r] == 0)
#define MAY_REST   (!(LIVE == 1 && MORE_D))       /* a plan need not have D, even where some is left */
#if N == 2
#define ROOM       (len(plan[0]) < AHEAD && len(plan[1]) < AHEAD)
#elif N == 3
#define ROOM       (len(plan[0]) < AHEAD && len(plan[1]) < AHEAD && len(plan[2]) < AHEAD)
#else
#define ROOM       (len(plan[0]) < AHEAD && len(plan[1]) < AHEAD && len(plan[2]) < AHEAD && len(plan[3]) < AHEAD)
#endif
#define OVER(r)    (len(plan[r]) == 0 && decodes == 0 && epochs == 0 && !open[r] && owed[r] == 0 && due[r] == 0)

/* Whoever begins a round first chooses for all: any set of groups, any moment for the epoch. */
inline choose()
{
    if
    :: MORE_D -> work = 1
#if GROUPS == 2
    :: MORE_D -> work = 2
    :: MORE_D -> work = 3
#endif
    :: MAY_REST && (open[r] || owed[r] > 0 || due[r] > 0 || MORE_P) -> work = 0
    fi;
    if
    :: MORE_P -> start = FIRST
    :: MORE_P && work != 0 -> start = AFTER
    :: work != 0 || !MORE_P -> start = NO
    fi;
#if LIVE
    number = 1;
#else
    decodes = decodes - (work != 0);
    epochs = epochs - (start != NO);
    number = E - epochs;
#endif
    j = 0;
    do
    :: j < N -> plan[j] ! ENTRY; j++
    :: else -> j = 0; break
    od
}

inline next_round()
{
    if
    :: len(plan[r]) == 0 -> choose()
    :: else
    fi;
    plan[r] ? entry;
    work = entry & 3; start = (entry >> 2) & 3; number = entry >> 4;
    entry = 0;
    mine = (work >> GROUP(r)) & 1;
#if PLAN == 1
    owed[r] = owed[r] + mine;
    if
    :: owed[r] > 0 -> mine = 1; owed[r]--
    :: mine = 0
    fi;
    work = mine;
#elif PLAN == 2
    if
    :: start != NO -> due[r] = number
    :: else
    fi;
    if
    :: due[r] > 0 -> start = FIRST; number = due[r]; due[r] = 0
    :: start = NO
    fi
#endif
}

#define WHAT(tag)  (1 + work + 4 * start + 16 * SPAN(r) + 64 * (tag))

/* ---------------------------------------------------------------- host: tasks */

inline activate(e, p)
{
    if
    :: e > epoch[r] || ACCEPT || LIVE ->
        epoch[r] = e;
        at[r] = 0;
        permit[r] = p;
        done[r] = 0;
        open[r] = TURN;
        going[r] = 1
    :: else                                     /* a stale or a duplicate epoch is refused */
    fi
}

inline close()
{
    open[r] = 0; at[r] = 0; permit[r] = 0; done[r] = 0
}

/* The next permit, or the end of the epoch: P was complete when this round stopped it. */
inline release()
{
#if FIN == 3
    complete = all_complete;
#endif
    if
    :: complete && FIN != 1 -> close()
    :: !(complete && FIN != 1) && (mine || !FORGET) && permit[r] < BOUNDS(r) -> permit[r] = permit[r] + SPAN(r)
    :: else
    fi
}

inline rest()                                   /* what a round leaves behind is nobody's business */
{
    d_step { work = 0; start = 0; number = 0; mine = 0; complete = 0 }
}

inline launch()
{
    if
    :: mine -> enqueue(LAUNCH(r), D)
    :: else
    fi
}

#if FIN >= 2
#define COMPLETE   (done[r] && p_open[r] == 0)
#else
#define COMPLETE   done[r]
#endif
#define OUT        (r == BAD && IDLE == 1 && !mine)
#define MAKES(how) ((how) == 1 && !OUT || (how) == 2 && r != BAD)
#define TAG(tag)   (SWAP && r == BAD -> 1 - (tag) : (tag))

/* A round with P. */
inline turn()
{
#if REACHED == 1
    STEP { AWAIT(r, STANDS(r)); complete = COMPLETE; come(TAG(PRE_D), MAKES(PRE), WHAT(TAG(PRE_D)), complete) };
    STEP { AWAIT(r, GONE(TAG(PRE_D)));
#elif REACHED == 2
    STEP { AWAIT(r, true); come(TAG(PRE_D), MAKES(PRE), WHAT(TAG(PRE_D)), complete) };
    STEP { AWAIT(r, GONE(TAG(PRE_D))) };
    STEP { AWAIT(r, STANDS(r)); complete = COMPLETE;
#else
    STEP { AWAIT(r, true); launch() };
    STEP { AWAIT(r, STANDS(r)); complete = COMPLETE; come(TAG(PRE_D), MAKES(PRE), WHAT(TAG(PRE_D)), complete) };
    STEP { AWAIT(r, GONE(TAG(PRE_D)));
#endif
#if PERMIT >= 2
           release();
#endif
#if PERMIT == 3
    }; STEP { AWAIT(r, true);
#endif
#if REACHED != 3
           launch();
#endif
#if PERMIT == 1
           release();
#endif
           come(TAG(POST_D), MAKES(POST), WHAT(TAG(POST_D)), complete) };
    STEP { AWAIT(r, GONE(TAG(POST_D)));
#if PERMIT == 0
           release();
#endif
           rest()
    }
}

/* A round without. */
inline plain()
{
    STEP { AWAIT(r, true); launch();
#if EVERY
           come(POST_D, 1, WHAT(POST_D), 0)
    };
    STEP { AWAIT(r, GONE(POST_D));
#endif
           if
           :: start == AFTER -> activate(number, SPAN(r))
           :: else
           fi;
           rest()
    }
}

proctype Engine(byte r)
{
    byte work, start, number, entry;
    bit mine, complete, again, same_order = 1;

    do
    :: AWAIT(r, OVER(r)) -> break
    :: atomic { AWAIT(r, !OVER(r) && (LAG == 0 || d_open[r] < LAG)) && (len(plan[r]) > 0 || ROOM) ->
#if FIN == 1
            if
            :: open[r] && done[r] -> close()
            :: else
            fi;
#endif
            next_round();
#if AGAIN
            if
            :: r == BAD && !again && epoch[r] > 0 && open[r] == (AGAIN == 1) -> again = 1; activate(epoch[r], 0)
            :: true
            fi;
#endif
            if
            :: start == FIRST -> activate(number, 0)
            :: else
            fi
       };
       if
       :: open[r] && !(IDLE == 2 && r == BAD && !mine) -> turn()
       :: else -> plain()
       fi
    od;
    len(queue[LAUNCH(r)]) == 0 && len(queue[LAUNCH(r) + 1]) == 0 && !going[r]
}

#define PERMITTED  (at[r] <= permit[r] || !TURN || PASS == 2 || PASS == 1 && r == BAD)

proctype Prefill(byte r)
{
    bit within_permit = 1, same_order = 1;

end:
    do
    :: STEP { AWAIT(r, going[r] && at[r] == 0) -> at[r] = 1 }
    :: STEP { AWAIT(r, going[r] && at[r] > 0 && PERMITTED) ->
#if RULES
            within_permit = (at[r] <= permit[r] || !TURN);
            assert(within_permit);
#endif
            enqueue(P_STREAM(r), CALL(r));
            if
            :: at[r] < BOUNDS(r) -> at[r]++
            :: else -> going[r] = 0; done[r] = 1    /* in this order: once it is done, the next epoch may start it again */
            fi
       }
    od
}

init
{
    byte r = 0;
    atomic {
        do
        :: r < N -> run Engine(r);
            run Prefill(r);
#if !PROMPT
            run Device(r);
#endif
            r++
        :: else -> break
        od;
        run AllReduce();
        run Gather(0);
#if GROUPS == 2
        run Gather(1)
#endif
    }
}

#if LIVE == 1
ltl decodes_for_ever { []<> (tick == 1) && []<> (tick == 0) }
#elif LIVE == 2
ltl every_epoch_closes { []<> (!open[0]) }
#endif
